"""A network between engines and front that a test can break."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from dualpath.control.messages import ToEngine

_HEADER_BYTES = 4


class ControlProxy:
    """Forwards control connections to the front, from a thread of its own.

    Args:
        front_port: where the front listens on 127.0.0.1.
        port: where engines connect.
    """

    def __init__(self, front_port: int, port: int) -> None:
        self._front_port = front_port
        self.port = port
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._late: dict[str, float] = {}
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._ready: Future[None] = Future()
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        self._ready.result(10)

    def reset(self) -> None:
        """Break every connection with a TCP reset."""
        self._call(self._reset)

    def delay(self, kind: str, seconds: float) -> None:
        """From now on the front's messages of that type come late (0: as they are sent), and
        everything behind them too."""
        self._call(lambda: self._late.update({kind: seconds}))

    def stop(self) -> None:
        """End."""
        assert self._stopping is not None
        self._call(self._stopping.set)
        self._thread.join(10)

    def _call(self, work: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(work)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self._ready.set_result(None)
        await self._stopping.wait()
        server.close()
        self._reset()

    def _reset(self) -> None:
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            front = await asyncio.open_connection("127.0.0.1", self._front_port)
        except OSError:
            writer.close()
            return
        self.connections += 1
        pair = {writer, front[1]}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._forward(reader, front[1]), self._forward_messages(front[0], writer)
            )
        except (OSError, asyncio.IncompleteReadError):
            pass  # one side has gone: so has the other, below
        finally:
            self._writers -= pair
            for end in pair:
                end.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _forward_messages(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            header = await reader.readexactly(_HEADER_BYTES)
            body = await reader.readexactly(int.from_bytes(header, "big"))
            name = type(self._decoder.decode(body)).__name__
            if seconds := self._late.get(name, 0.0):
                await asyncio.sleep(seconds)
            writer.write(header + body)
            await writer.drain()
