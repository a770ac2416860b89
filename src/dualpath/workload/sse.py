"""Server-sent events, as OpenAI-compatible servers stream them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MAX_EVENT_BYTES: Final = 64 << 20
"""A first event may carry a whole prompt's token ids; past this the stream is not one of ours."""


class EventError(ValueError):
    """The bytes are not an event stream."""


class EventParser:
    """Cuts a byte stream into the payloads of its ``data:`` events. One owner.

    Keep-alive comments and other fields are skipped. A payload may arrive in any number of pieces;
    each byte is looked at once.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []

    @property
    def pending(self) -> bool:
        """Whether an event has begun and its end has not been seen."""
        return bool(self._buffer or self._data)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Payloads that ``piece`` completes, in order.

        Raises:
            EventError: an event larger than ``MAX_EVENT_BYTES``.
        """
        self._buffer += piece
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end]).rstrip(b"\r")
            del self._buffer[: end + 1]
            self._searched = 0
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payload = b"\n".join(self._data)
                self._data.clear()
                yield payload
        self._searched = len(self._buffer)
        if self._searched > MAX_EVENT_BYTES:
            raise EventError(f"an event of more than {MAX_EVENT_BYTES} bytes")
