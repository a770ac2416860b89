"""When an online run ends by the published rule (arXiv 2602.21548, section 7.4).

It ends when the TTFT exceeds its limit, or has become steady: over a sliding window it differs by
less than 5 % from what it was half an hour before.
"""

from __future__ import annotations

import enum
from typing import Final

WINDOW_S: Final = 150.0
BEFORE_S: Final = 1_800.0
VARIATION: Final = 0.05
LONGEST_S: Final = 6 * 3_600.0
"""Of our own: a run that has become neither by then is given up."""
_BIN_S: Final = 10.0
_BINS: Final = round(WINDOW_S / _BIN_S)
_BACK: Final = round(BEFORE_S / _BIN_S)


class End(enum.Enum):
    """How a run ended."""

    STEADY = "steady"
    EXCEEDED = "exceeded"
    """The TTFT was above its limit over a whole window."""
    GIVEN_UP = "given up"
    """Neither came in time."""


class SteadyRule:
    """Watches the first tokens of a run.

    Args:
        limit_s: of the TTFT.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._sums: list[float] = []
        self._counts: list[int] = []

    def first_token(self, now_s: float, ttft_s: float) -> None:
        """A first token came now. Times do not fall."""
        index = int(now_s / _BIN_S)
        while len(self._sums) <= index:
            self._sums.append(0.0)
            self._counts.append(0)
        self._sums[index] += ttft_s
        self._counts[index] += 1

    def end(self, now_s: float) -> End | None:
        """Whether the run is over, judged by the window that ended at the last full bin."""
        if now_s > LONGEST_S:
            return End.GIVEN_UP
        last = int(now_s / _BIN_S)
        latest = self._mean(last)
        if latest is None:
            return None
        if latest > self._limit_s:
            return End.EXCEEDED
        before = self._mean(last - _BACK)
        if before is not None and abs(latest - before) < VARIATION * before:
            return End.STEADY
        return None

    def _mean(self, last: int) -> float | None:
        """Mean TTFT of the window before bin ``last``; None without a whole window or a token."""
        first = last - _BINS
        if first < 0:
            return None
        count = sum(self._counts[first:last])
        return sum(self._sums[first:last]) / count if count else None
