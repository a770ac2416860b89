"""Running the front: the API's HTTP server around it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator

import uvicorn

from dualpath.config import ClusterConfig, ConfigError, SecurityConfig
from dualpath.serve.app import make_app
from dualpath.serve.front import Front
from dualpath.serve.waiting import any_of


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: who runs the front decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


def check_tls(security: SecurityConfig) -> None:
    """Try the TLS files, when there are any.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if not security.tls_cert_file:
        return
    for field, path in (
        ("tls_cert_file", security.tls_cert_file),
        ("tls_key_file", security.tls_key_file),
    ):
        try:
            with open(path, "rb"):  # noqa: PTH123 - only whether it can be read
                pass
        except OSError as error:
            raise ConfigError(f"security.{field}: {path}: {error.strerror}") from None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            security.tls_cert_file, security.tls_key_file
        )
    except ssl.SSLError as error:
        raise ConfigError(
            f"security.tls_cert_file, tls_key_file: not a PEM certificate and its key: {error}"
        ) from None


async def serve(
    config: ClusterConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event,
) -> None:
    """Run the front until ``stop`` is set, then end what is under way and return.

    Args:
        ready: called with the API's URL once it can be reached (engines may join later).
        stop: set by the caller, in this loop.

    Raises:
        ConfigError: the TLS files cannot be used.
        StoreError: the store cannot be read.
        OSError: an address cannot be bound.
        RuntimeError: a part of the front died; the cause is attached.
    """
    check_tls(config.security)
    front = Front(config)
    family = socket.AF_INET6 if ":" in config.front.host else socket.AF_INET
    listener = socket.create_server((config.front.host, config.front.port), family=family)
    try:
        await front.start()
        server = _Server(
            uvicorn.Config(
                make_app(front),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=max(1, round(config.timeouts.drain)),
                ssl_certfile=config.security.tls_cert_file or None,
                ssl_keyfile=config.security.tls_key_file or None,
            )
        )
        running = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        if ready is not None:  # the socket listens already: a client that comes now is queued
            host = f"[{config.front.host}]" if family is socket.AF_INET6 else config.front.host
            scheme = "https" if config.security.tls_cert_file else "http"
            ready(f"{scheme}://{host}:{listener.getsockname()[1]}")
        await any_of(running, stopping, front.failed)
        stopping.cancel()
        front.drain()
        server.should_exit = True
        await running
    finally:
        await front.close()
        listener.close()
    if front.failed.done():
        raise RuntimeError("a part of the front died") from front.failed.result()
