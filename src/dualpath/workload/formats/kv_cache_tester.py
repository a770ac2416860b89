"""Recorded coding-agent sessions of callanjfox/kv-cache-tester: one JSON object a session.

A request has its time ``t``, prompt and answer lengths ``in`` and ``out``, and the ids of its
prompt's blocks. Sub-agents are nested entries and become trajectories of their own. What the
recording has and a trajectory cannot have:

* a request that repeats the one before it (a streamed and a plain copy): the later one counts;
* a prompt that drops much of what came before (a compacted context): a new trajectory begins where
  less than ``KEPT_SHARE`` of the previous prompt survives;
* a prompt no longer than prompt and answer before it: see ``formats.rounds``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dualpath.workload.blocks import common_prefix, encode_blocks
from dualpath.workload.formats.rounds import rounds_of
from dualpath.workload.trace import Tokens, TraceError, Trajectory

KEPT_SHARE: Final = 0.95

Seconds = Annotated[float, Meta(ge=0)]


class _Request(msgspec.Struct, rename={"prompt": "in"}):
    type: str
    t: float = 0.0
    prompt: Tokens = 0
    out: Tokens = 0
    hash_ids: list[int] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    agent_id: str | None = None
    requests: list[_Request] = []


class _Session(msgspec.Struct):
    id: str
    requests: list[_Request]
    block_size: Annotated[int, Meta(ge=1)] = 64
    hash_id_scope: str = "local"
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0


_DECODER: Final = msgspec.json.Decoder(_Session)


@dataclass(slots=True)
class KvCacheTester:
    """Reads sessions one after another.

    Attributes:
        blocks: keep block ids. Those of sessions that number their own blocks (not
            ``hash_id_scope`` global) are shifted so that no two sessions share any.
        repeats: requests that were repeated so far.
        clamped: appends taken as 1 token so far.
        min_rounds: shorter segments are dropped.
        dropped: those dropped so far.
    """

    blocks: bool = True
    min_rounds: int = 1
    repeats: int = 0
    clamped: int = 0
    dropped: int = 0
    _next_id: int = field(default=0, repr=False)

    def read(self, document: bytes) -> Iterator[Trajectory]:
        """Trajectories of one session: its segments, then those of the agents below it.

        Raises:
            TraceError: ``field: what is wrong``.
        """
        try:
            session = _DECODER.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(str(error)) from None
        shift = 0 if session.hash_id_scope == "global" else self._next_id
        self._next_id = max(self._next_id, shift + 1 + max(_ids(session.requests), default=-1))
        yield from self._thread(session, session.id, "main", session.requests, shift)
        for number, agent in enumerate(_nested(session.requests)):
            name = f"{session.id}.sa{number}"
            yield from self._thread(session, name, "sub", agent.requests, shift)

    def finish(self) -> Iterator[Trajectory]:
        """Nothing: sessions are whole documents."""
        return iter(())

    def _thread(
        self, session: _Session, name: str, kind: str, requests: Sequence[_Request], shift: int
    ) -> Iterator[Trajectory]:
        segment: list[_Request] = []
        number = 0
        for request in requests:
            if not request.prompt:  # also what only holds the requests of an agent below
                continue
            if segment and _repeats(segment[-1], request):
                self.repeats += 1
                segment[-1] = request
                continue
            if segment and not _continues(segment[-1], request, session.block_size):
                yield from self._segment(session, f"{name}.{number}", kind, segment, shift)
                segment, number = [], number + 1
            segment.append(request)
        if segment:
            yield from self._segment(session, f"{name}.{number}", kind, segment, shift)

    def _segment(
        self, session: _Session, name: str, kind: str, segment: list[_Request], shift: int
    ) -> Iterator[Trajectory]:
        if len(segment) < self.min_rounds:
            self.dropped += 1
            return
        lengths = [(request.prompt, request.out) for request in segment]
        rounds, clamped = rounds_of(lengths, list(map(_latency_s, segment, segment[1:])))
        self.clamped += clamped
        first = name.endswith(".0")
        extra: dict[str, Any] = {"kind": kind, "start": "first" if first else "reset"}
        if prefix := session.tool_tokens + session.system_tokens:
            extra["shared_prefix"] = prefix
        if self.blocks and all(request.hash_ids for request in segment):
            extra["block"] = session.block_size
            shifted = ([item + shift for item in request.hash_ids] for request in segment)
            extra["blocks"] = encode_blocks(shifted)
        yield Trajectory(name, rounds, extra)


def _repeats(before: _Request, request: _Request) -> bool:
    return request.prompt == before.prompt and request.hash_ids == before.hash_ids


def _continues(before: _Request, request: _Request, block_size: int) -> bool:
    """Whether enough of the prompt before survives. Without block ids all that can be seen is
    that the prompt did not shrink by more than that."""
    if not before.hash_ids or not request.hash_ids:
        return request.prompt >= KEPT_SHARE * before.prompt
    kept = common_prefix(before.hash_ids, request.hash_ids)
    full = before.prompt // block_size  # a half-filled last block gets another id as it fills
    return kept >= KEPT_SHARE * full


def _latency_s(before: _Request, request: _Request) -> float:
    """Client's time between an answer and the next request; where the recording does not tell it
    from the server's, the time between the two requests."""
    if request.think_time is not None:
        return request.think_time
    return max(0.0, request.t - before.t - (before.api_time or 0.0))


def _nested(requests: Sequence[_Request]) -> Iterator[_Request]:
    """Entries that hold the requests of an agent below, at any depth."""
    for request in requests:
        if request.requests:
            yield request
            yield from _nested(request.requests)


def _ids(requests: Sequence[_Request]) -> Iterator[int]:
    for request in requests:
        yield from request.hash_ids
        yield from _ids(request.requests)
