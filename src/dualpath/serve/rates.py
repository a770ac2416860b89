"""Rates of growing totals over a sliding window, and how far apart several of them are."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class RateWindow:
    """What each of several totals grew by, per second, over the last ``window_s``.

    A total that fell (its engine started anew) counts from zero. Belongs to one thread.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._grown: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, now_s: float, totals: Mapping[str, float]) -> None:
        """Take the totals at a moment; moments must not go back."""
        for name, total in totals.items():
            before = self._last.get(name)
            if before is None:
                # What it had before it was first seen is not growth of this window.
                self._grown.setdefault(name, 0.0)
            else:
                self._grown[name] += total - before if total >= before else total
            self._last[name] = total
        for name in self._last.keys() - totals.keys():
            del self._last[name]
            del self._grown[name]
        self._samples.append((now_s, dict(self._grown)))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()

    def per_second(self) -> dict[str, float]:
        """Rate by name; zero for a total that has been seen only once."""
        if not self._samples:
            return {}
        newest_s, newest = self._samples[-1]
        rates: dict[str, float] = {}
        for name, grown in newest.items():
            rates[name] = 0.0
            for then_s, sample in self._samples:
                if name in sample and then_s < newest_s:
                    rates[name] = max(0.0, grown - sample[name]) / (newest_s - then_s)
                    break
        return rates


def difference_ratio(values: Mapping[str, float]) -> float:
    """``(most - least) / most``: zero when all are equal, or nothing moves."""
    most = max(values.values(), default=0.0)
    return 0.0 if most <= 0 else (most - min(values.values())) / most


def max_over_mean(values: Mapping[str, float]) -> float:
    """The largest over the mean: one when all are equal, or nothing moves."""
    total = sum(values.values())
    return 1.0 if total <= 0 else max(values.values()) * len(values) / total
