"""Framing of control messages over a stream: four length bytes, then MessagePack.

Plain TCP rather than a message queue on purpose: when a process dies the kernel closes its
connection, and end-of-stream is the only proof that a peer will do no more I/O. A stopped process
keeps its connection, so silence is never mistaken for death.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Generic, TypeVar

import msgspec

from dualpath.control.messages import Message

MAX_MESSAGE_BYTES = 256 << 20
_HEADER_BYTES = 4
_READ_BYTES = 1 << 16

T = TypeVar("T")


class ChannelError(ConnectionError):
    """The peer sent something that is not a message."""


class Channel(Generic[T]):
    """A connection that carries messages. ``T`` is the union of types it receives.

    ``send`` may be called from any task of the loop and never waits: messages are queued in order
    in the transport. ``receive`` has one caller.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: type[T]
    ) -> None:
        self._reader = reader
        self._received = bytearray()
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanished without closing is noticed after about 15 s.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def closing(self) -> bool:
        """Whether this side has closed, or the transport has failed."""
        return self._writer.is_closing()

    def send(self, message: Message) -> None:
        """Queue a message. Silently dropped once the connection is closing: the reader's end of
        stream is what reports that."""
        if self._writer.is_closing():
            return
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ChannelError(f"{type(message).__name__} of {len(body)} bytes is too large")
        self._writer.write(len(body).to_bytes(_HEADER_BYTES, "big") + body)

    async def receive(self) -> T:
        """Next message.

        Raises:
            EOFError: the peer closed or died.
            ChannelError: the bytes are not a known message.
        """
        await self._have(_HEADER_BYTES)
        length = int.from_bytes(self._received[:_HEADER_BYTES], "big")
        if length > MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message of {length} bytes is too large")
        end = _HEADER_BYTES + length
        await self._have(end)
        body = bytes(self._received[_HEADER_BYTES:end])
        del self._received[:end]
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ChannelError(f"not a control message: {error}") from error

    async def _have(self, count: int) -> None:
        """Wait for that many bytes; those that come with them are kept for the next message."""
        while len(self._received) < count:
            try:
                piece = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise EOFError("the peer closed the control connection") from error
            if not piece:
                raise EOFError("the peer closed the control connection")
            self._received += piece

    async def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, then close; gives up after ``timeout_s``."""
        self._writer.close()
        with contextlib.suppress(ConnectionError, OSError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._writer.wait_closed()


async def connect(host: str, port: int, receives: type[T], timeout_s: float) -> Channel[T]:
    """Open a channel.

    Raises:
        TimeoutError, OSError: nobody answers there.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
    return Channel(reader, writer, receives)
