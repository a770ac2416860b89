"""Request logs with block ids and no names of conversations: Mooncake's FAST'25 traces.

A line is one request: ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``,
chained ids of 512-token blocks, so that an id stands for everything up to its end. A request goes
on with the conversation whose latest prompt it extends: it has the id of that prompt's last full
block, which no other conversation has, and is long enough for the answer too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dualpath.workload.blocks import encode_blocks
from dualpath.workload.formats.rounds import rounds_of
from dualpath.workload.trace import Tokens, TraceError, Trajectory

BLOCK_TOKENS: Final = 512
IDLE_S: Final = 3600.0
_MS: Final = 1e-3


class _Request(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    output_length: Tokens
    hash_ids: list[int]


_DECODER: Final = msgspec.json.Decoder(_Request)


@dataclass(slots=True)
class _Conversation:
    name: str
    first_ms: float
    head: int | None = None
    requests: list[_Request] = field(default_factory=list)
    own_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Mooncake:
    """Joins requests to conversations as they are read; requests come in order of time.

    A conversation is over, and leaves memory, when it has had no request for ``idle_s``.

    Attributes:
        blocks: keep block ids.
        idle_s: see above.
        min_rounds: shorter conversations are dropped, and counted.
        dropped: those dropped so far.
        clamped: appends taken as 1 token so far, see ``formats.rounds``.
    """

    blocks: bool = True
    idle_s: float = IDLE_S
    min_rounds: int = 1
    dropped: int = 0
    clamped: int = 0
    _number: int = 0
    _now_ms: float = 0.0
    _open: dict[str, _Conversation] = field(default_factory=dict, repr=False)
    _owner: dict[int, _Conversation] = field(default_factory=dict, repr=False)
    _shared: set[int] = field(default_factory=set, repr=False)

    def read(self, document: bytes) -> Iterator[Trajectory]:
        """Conversations that are over at the time of this request.

        Raises:
            TraceError: ``field: what is wrong``.
        """
        try:
            request = _DECODER.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(str(error)) from None
        if request.timestamp < self._now_ms:
            raise TraceError(
                f"timestamp: requests must be in order of time, got {request.timestamp:g} after "
                f"{self._now_ms:g}"
            )
        self._now_ms = request.timestamp
        yield from self._close(self._now_ms - self.idle_s / _MS)
        name = f"mc{self._number:05d}"
        self._number += 1
        found = self._find(request)
        if found is None:
            found = _Conversation(name, request.timestamp)
        else:
            del self._open[found.name]  # entered again below: the dict is in order of last requests
        self._open[found.name] = found
        found.requests.append(request)
        full = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        for item in full:
            owner = self._owner.setdefault(item, found)
            if owner is not found:
                self._shared.add(item)
            elif item not in self._shared:
                found.own_ids.append(item)
        found.head = full[-1] if full else None

    def finish(self) -> Iterator[Trajectory]:
        """The conversations still open, once all is read."""
        yield from self._close(None)

    def _find(self, request: _Request) -> _Conversation | None:
        for item in reversed(request.hash_ids):
            if item in self._shared:
                return None
            found = self._owner.get(item)
            if found is not None:
                return found if found.head == item and _extends(found, request) else None
        return None

    def _close(self, before_ms: float | None) -> Iterator[Trajectory]:
        while self._open:
            item = next(iter(self._open.values()))  # the one whose last request is the oldest
            if before_ms is not None and item.requests[-1].timestamp >= before_ms:
                break
            del self._open[item.name]
            for own in item.own_ids:
                self._owner.pop(own, None)
            if len(item.requests) < self.min_rounds:
                self.dropped += 1
            else:
                yield self._trajectory(item)

    def _trajectory(self, item: _Conversation) -> Trajectory:
        lengths = [(request.input_length, request.output_length) for request in item.requests]
        times_s = [request.timestamp * _MS for request in item.requests]
        rounds, clamped = rounds_of(lengths, [b - a for a, b in pairwise(times_s)])
        self.clamped += clamped
        extra: dict[str, Any] = {"t0_ms": item.first_ms}
        if self.blocks:
            extra["block"] = BLOCK_TOKENS
            extra["blocks"] = encode_blocks(request.hash_ids for request in item.requests)
        return Trajectory(item.name, rounds, extra)


def _extends(item: _Conversation, request: _Request) -> bool:
    before = item.requests[-1]
    return request.input_length >= before.input_length
