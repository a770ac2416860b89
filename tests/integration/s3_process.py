"""The S3 server's process: ``python s3_process.py PORT``. Moto's own application and HTTP server.

Moto looks whether a write's condition holds and then writes, in two steps that other threads may
come between. Real servers do both as one, and the store relies on it; so here requests are carried
out one at a time, though received side by side.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


class OneAtATime:
    """A WSGI application around another."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # Received first: a client that is slow, or gone, must not keep the others waiting.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self._lock:
            return [b"".join(self._app(environ, start_response))]


if __name__ == "__main__":
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        OneAtATime(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
    )
