"""What has been sent to a client so far. One per request; whoever writes to it owns it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Send

from dualpath.serve.errors import error_body

_DONE = b"data: [DONE]\n\n"


class Reply:
    """Writes an answer, whole or as server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: dict[str, str] = {}
        self.started = False
        self.ended = False
        self.status = 0
        self.first_byte_s: float | None = None

    async def whole(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer as JSON."""
        await self._start(status, "application/json", {"content-length": str(len(body))}, headers)
        await self._send({"type": "http.response.body", "body": body})
        self.ended = True

    async def whole_json(self, status: int, body: Mapping[str, Any]) -> None:
        """The same with an object."""
        await self.whole(status, msgspec.json.encode(body))

    async def events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Server-sent events, in one piece; the first ones send the headers too."""
        if data := _encoded(events):
            await self._piece(data)

    async def end_stream(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """The last events and ``[DONE]``, in one piece."""
        await self._piece(_encoded(events) + _DONE, last=True)

    async def fail(
        self,
        status: int,
        message: str,
        *,
        kind: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """An error: a status of its own while nothing has been sent, else an event that ends the
        stream."""
        await self.fail_with(status, error_body(status, message, kind, param), headers)

    async def fail_with(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """The same with a finished body."""
        if self.ended:
            return
        if not self.started:
            await self.whole(status, body, headers)
            return
        # One line, whatever the engine's error looked like: a line break would end the event.
        await self._piece(b"data: " + b" ".join(body.splitlines()) + b"\n\n" + _DONE, last=True)

    async def _piece(self, data: bytes, *, last: bool = False) -> None:
        if not self.started:
            await self._start(
                200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.ended = last

    async def _start(
        self,
        status: int,
        content_type: str,
        own: Mapping[str, str],
        further: Mapping[str, str] | None = None,
    ) -> None:
        self.started = True
        self.status = status
        self.first_byte_s = time.monotonic()
        headers = {"content-type": content_type, **own, **self.headers, **(further or {})}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )


def _encoded(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
