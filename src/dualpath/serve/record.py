"""What happened to a request: one log line, response headers, and a short memory for debugging."""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgspec

from dualpath.serve.tempo import Tempo
from dualpath.spans import Spans

logger = logging.getLogger("dualpath.requests")
_REMEMBERED: Final = 256


class Outcome(enum.Enum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Path(enum.Enum):
    """Which side read the hit blocks."""

    NONE = "none"
    PE = "pe"
    DE = "de"
    SPLIT = "split"


class Phase(enum.Enum):
    """Parts of the time to the first token, in order. The PE samples token 1 at the end of
    ``PREFILL``; where the DE does, ``HANDOVER`` and the DE's own start come before it."""

    TOKENISE = "tokenise"
    SCHEDULE = "schedule"
    ALLOCATE = "allocate"
    READ = "read"
    PREFILL = "prefill"
    HANDOVER = "handover"
    """From the prefill's end until the prompt's KV is complete in the DE buffer."""


@dataclass(slots=True)
class Record:
    """One request. Times are seconds; those of phases are of the last try.

    Attributes:
        first_token: ``pe`` or ``de``: which engine sampled token 1; empty before it is known.
        hit_tokens: prompt tokens that came from storage, verified.
        pe_blocks, de_blocks: good blocks read by each side.
        first_byte_s, total_s: since arrival.
        ttft_s: arrival to token 1; ttst_s: token 1 to token 2; tpot_s: mean per token after
            token 1. None where the front cannot see it (whole answers come in one piece).
        output_tokens: of the answer, all choices together; None while unknown.
        moments: phases of all tries with their begin and end, for the timeline.
    """

    rid: str
    endpoint: str
    mode: str
    attempt: int = 0
    outcome: str = ""
    status: int = 0
    error: str = ""
    path: str = Path.NONE.value
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    pe_blocks: int = 0
    de_blocks: int = 0
    first_token: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    first_byte_s: float | None = None
    total_s: float = 0.0
    ttft_s: float | None = None
    ttst_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int | None = None
    arrived_s: float = field(default_factory=time.monotonic)
    moments: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Measure a phase, also when it fails."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.phases[phase.value] = end - start
            self.moments.append((phase.value, start, end))

    def measured(self, tempo: Tempo) -> None:
        """Take over what is known of the answer's tokens."""
        self.ttft_s = None if tempo.first_s is None else tempo.first_s - self.arrived_s
        self.ttst_s = tempo.second_gap_s
        self.tpot_s = tempo.per_token_s
        self.output_tokens = tempo.tokens

    def headers(self) -> dict[str, str]:
        """What the client is told."""
        return {
            "x-request-id": self.rid,
            "x-dualpath-path": self.path,
            "x-dualpath-hit-tokens": str(self.hit_tokens),
            "x-dualpath-first-token": self.first_token or "de",
            "x-dualpath-attempt": str(self.attempt),
        }

    def as_dict(self) -> dict[str, Any]:
        """For logs and ``/debug/requests``."""
        values = {name: getattr(self, name) for name in _SHOWN}
        values["phases"] = dict(self.phases)
        return values


_SHOWN: Final = tuple(
    one.name for one in fields(Record) if one.name not in ("arrived_s", "moments")
)


class RecordLog:
    """Finished requests, newest last.

    Args:
        spans: where each is drawn, too.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self._records: deque[Record] = deque(maxlen=_REMEMBERED)

    def add(self, record: Record) -> None:
        """Log and remember."""
        record.total_s = time.monotonic() - record.arrived_s
        self._records.append(record)
        if self._spans is not None:
            _draw(record, self._spans)
        if logger.isEnabledFor(logging.INFO):
            shown = record.as_dict()
            logger.info("%s", msgspec.json.encode(shown).decode(), extra={"fields": shown})

    def recent(self) -> list[dict[str, Any]]:
        """The last ones."""
        return [record.as_dict() for record in self._records]

    def close(self) -> None:
        """End the drawing."""
        if self._spans is not None:
            self._spans.close()


def _draw(record: Record, spans: Spans) -> None:
    """A request on a track of its own: its phases, then the time in which the DE decodes."""
    track = f"request {record.rid[:8]}"
    end_s = record.arrived_s + record.total_s
    facts = {
        "path": record.path, "prompt_tokens": record.prompt_tokens, "hit_tokens": record.hit_tokens,
        "prefill": record.prefill, "decode": record.decode, "outcome": record.outcome,
    }  # fmt: skip
    spans.span(track, record.outcome, record.arrived_s, end_s, facts)
    for name, started_s, ended_s in record.moments:
        spans.span(track, name, started_s, ended_s)
    if record.moments and record.outcome == Outcome.OK.value:
        spans.span(track, "decode", record.moments[-1][2], end_s)
