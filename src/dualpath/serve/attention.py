"""The latest attention measurements of a PE, for ``dualpath profile`` and ``/debug/attention``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

_REMEMBERED: Final = 2000


class AttentionSamples:
    """``(cached tokens, computed tokens, seconds)`` of steps with a single request, newest last.

    Belongs to the event loop. ``total`` counts all there have been, so that whoever looks twice
    knows which ones are new.
    """

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_REMEMBERED)

    def extend(self, samples: Iterable[tuple[int, int, float]]) -> None:
        """A report has brought some."""
        for sample in samples:
            self._recent.append(sample)
            self.total += 1

    def as_dict(self) -> dict[str, Any]:
        """For ``/debug/attention``."""
        return {"total": self.total, "samples": list(self._recent)}
