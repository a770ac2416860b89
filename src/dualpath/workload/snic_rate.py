"""How fast a node's SNIC reads, from looks at its totals while reads queue. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """A node at a moment.

    Attributes:
        at_s: when, on any clock.
        read_bytes: read from storage so far.
        queued: whether reads were waiting or under way on each of its engines.
    """

    at_s: float
    read_bytes: int
    queued: bool


@dataclass(frozen=True, slots=True)
class Busy:
    """What was read, in how long, while reads queued."""

    read_bytes: int
    seconds: float

    @property
    def bytes_s(self) -> float:
        """The rate; 0 when nothing was seen."""
        return self.read_bytes / self.seconds if self.seconds else 0.0


def while_busy(looks: Sequence[Look]) -> Busy:
    """Bytes and seconds of all stretches of ``looks`` with queued reads.

    A stretch counts from the first to the last look at which the total had risen: totals come in
    reports, so between two of them it stands still, and what happened before the first rise is not
    known to have been busy.
    """
    read_bytes, seconds = 0, 0.0
    rises: list[Look] = []
    before: Look | None = None
    for look in [*looks, None]:
        if look is None or not look.queued:
            if len(rises) > 1:
                read_bytes += rises[-1].read_bytes - rises[0].read_bytes
                seconds += rises[-1].at_s - rises[0].at_s
            rises = []
        elif before is not None and look.read_bytes > before.read_bytes:
            rises.append(look)
        before = look
    return Busy(read_bytes, seconds)


def over_all(looks: Sequence[Look], start_s: float) -> Busy:
    """From ``start_s`` to the last rise: what the SNIC did at least, whatever else was slow."""
    if not looks:
        return Busy(0, 0.0)
    last = looks[0]
    for look in looks:
        if look.read_bytes > last.read_bytes:
            last = look
    return Busy(last.read_bytes - looks[0].read_bytes, max(0.0, last.at_s - start_s))
