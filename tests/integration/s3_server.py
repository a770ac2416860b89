"""A real S3 server in a process of its own (moto), and a proxy that spoils what passes.

The proxy lies between client and server where a test wants a network or a server that misbehaves;
everything else talks to the server directly.
"""

import os
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
from obstore.store import S3Store

from dualpath.config import S3Config, Seconds, StorageConfig
from dualpath.storage import BlockId
from dualpath.storage.paths import block_name

BUCKET = "dualpath-test"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
               "AWS_REGION": "us-east-1"}  # fmt: skip
PAGES = {"MOTO_S3_DEFAULT_MAX_KEYS": "20"}
"""Short ones, so that a few objects fill several."""
_START_S = 60.0


def object_name(root: bytes, block: BlockId) -> str:
    """A block's object, below its store's prefix."""
    return f"blocks/{root.hex()}/{block.key[:1].hex()}/{block_name(block)}"


class S3Server:
    """A running server with one bucket."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("s3_process.py")), str(self.port)],
                stdout=file, stderr=file, env=os.environ | CREDENTIALS | PAGES,
            )  # fmt: skip
        self._wait(log)
        self._client = S3Store(
            BUCKET, endpoint=self.endpoint, region="us-east-1", access_key_id="test",
            secret_access_key="test", client_options={"allow_http": True},
        )  # fmt: skip

    def _wait(self, log: Path) -> None:
        end_s = time.monotonic() + _START_S
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                if time.monotonic() > end_s or self.process.poll() is not None:
                    self.stop()
                    raise RuntimeError(log.read_text()) from None
                time.sleep(0.05)

    def storage(self, prefix: str, endpoint: str = "", **settings: object) -> StorageConfig:
        """A store below ``prefix``, asked with little patience."""
        s3 = S3Config(
            endpoint=endpoint or self.endpoint,
            allow_http=True,
            **{"timeout": Seconds(10.0), **settings},  # type: ignore[arg-type]
        )
        return StorageConfig(path=f"s3://{BUCKET}/{prefix}", batch_blocks=8, s3=s3)

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self._client, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._client, name, data)

    def delete(self, name: str) -> None:
        obstore.delete(self._client, name)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below a prefix."""
        pages = obstore.list(self._client, prefix.rstrip("/"), chunk_size=1000)
        return {meta["path"]: meta["size"] for page in pages for meta in page}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Proxy:
    """Passes connections on to a server, and spoils them.

    Attributes:
        hang: take requests and answer nothing.
        answer: say this instead of asking the server.
        cut_after: close a connection after so many bytes of answers.
        times: how many requests to spoil at most.
        only: spoil requests with this in their head only (``b"PUT"``).
        spoiled: how many requests it has spoiled.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.hang = False
        self.answer = b""
        self.cut_after = -1
        self.only = b""
        self.times = 0
        self.spoiled = 0
        self.passing = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def spoil(self, *, hang: bool = False, status: str = "", cut_after: int = -1,
              only: bytes = b"", times: int = 1 << 30) -> None:  # fmt: skip
        """From now on; without arguments: no more."""
        self.only, self.hang, self.cut_after = only, hang, cut_after
        self.times = times
        self.spoiled = 0
        body = f"<Error><Code>{status.partition(' ')[2]}</Code></Error>"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.answer = f"{head}{body}".encode() if status else b""

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port), 5) as it,
        ):
            self._pump(client, it)

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        spoil = False
        while not self._over.is_set():
            for ready in select.select([client, server], [], [], 0.05)[0]:
                data = ready.recv(65536)
                if not data:
                    return
                if ready is server:
                    self.passing.set()
                    if spoil and self.cut_after >= 0:
                        server_left = max(0, self.cut_after - passed)
                        client.sendall(data[:server_left])
                        passed += len(data)
                        if passed >= self.cut_after:
                            return
                        continue
                    client.sendall(data)
                    continue
                method = data.split(b" ", 1)[0]
                if method in (b"GET", b"PUT", b"HEAD", b"DELETE", b"POST"):
                    spoil = self.only in data.partition(b"\r\n\r\n")[0]
                    spoil = spoil and (self.hang or bool(self.answer) or self.cut_after >= 0)
                    with self._lock:
                        spoil = spoil and self.spoiled < self.times
                        self.spoiled += spoil
                    passed = 0
                if spoil and self.hang:
                    continue
                if spoil and self.answer:
                    client.sendall(self.answer)
                    return
                server.sendall(data)


@contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    """A server for as long as the context lasts."""
    server = S3Server(folder / "s3-server.log")
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def proxy_to(server: S3Server) -> Iterator[Proxy]:
    """A proxy for as long as the context lasts."""
    proxy = Proxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()
