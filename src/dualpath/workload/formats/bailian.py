"""Request logs that name the request they follow: Alibaba's qwen-bailian-usagetraces-anon.

A line is one request: ``chat_id``, ``parent_chat_id`` (-1 for none), ``timestamp`` (s),
``input_length``, ``output_length`` and ``hash_ids``, chained ids of 16-token blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dualpath.workload.blocks import encode_blocks
from dualpath.workload.formats.mooncake import IDLE_S
from dualpath.workload.formats.rounds import rounds_of
from dualpath.workload.trace import Tokens, TraceError, Trajectory

BLOCK_TOKENS: Final = 16


class _Request(msgspec.Struct):
    chat_id: int
    parent_chat_id: int
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    output_length: Tokens
    hash_ids: list[int] = []


_DECODER: Final = msgspec.json.Decoder(_Request)


@dataclass(slots=True)
class Bailian:
    """Joins requests to conversations as they are read; see ``formats.mooncake.Mooncake``.

    A request whose parent has been followed already, or is unknown, begins a new conversation.
    """

    blocks: bool = True
    idle_s: float = IDLE_S
    min_rounds: int = 1
    dropped: int = 0
    clamped: int = 0
    _open: dict[int, list[_Request]] = field(default_factory=dict, repr=False)

    def read(self, document: bytes) -> Iterator[Trajectory]:
        """Conversations that are over at the time of this request.

        Raises:
            TraceError: ``field: what is wrong``.
        """
        try:
            request = _DECODER.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(str(error)) from None
        yield from self._close(request.timestamp - self.idle_s)
        requests = self._open.pop(request.parent_chat_id, [])
        if requests and request.input_length < requests[-1].input_length:
            yield from self._ended(requests)
            requests = []
        requests.append(request)
        self._open[request.chat_id] = requests  # in order of last requests

    def finish(self) -> Iterator[Trajectory]:
        """The conversations still open, once all is read."""
        yield from self._close(None)

    def _close(self, before_s: float | None) -> Iterator[Trajectory]:
        while self._open:
            name, requests = next(iter(self._open.items()))  # its last request is the oldest
            if before_s is not None and requests[-1].timestamp >= before_s:
                break
            del self._open[name]
            yield from self._ended(requests)

    def _ended(self, requests: list[_Request]) -> Iterator[Trajectory]:
        if len(requests) < self.min_rounds:
            self.dropped += 1
            return
        lengths = [(request.input_length, request.output_length) for request in requests]
        gaps_s = [max(0.0, b.timestamp - a.timestamp) for a, b in pairwise(requests)]
        rounds, clamped = rounds_of(lengths, gaps_s)
        self.clamped += clamped
        extra: dict[str, Any] = {"t0_ms": requests[0].timestamp * 1000}
        if self.blocks and all(request.hash_ids for request in requests):
            extra["block"] = BLOCK_TOKENS
            extra["blocks"] = encode_blocks(request.hash_ids for request in requests)
        yield Trajectory(f"bailian-{requests[0].chat_id}", rounds, extra)
