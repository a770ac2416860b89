"""The rate of one NIC, as a virtual clock."""

from __future__ import annotations

import math
from typing import Final

SLACK_S: Final = 0.005
"""Idle time that may be caught up: a sender that wakes a little late loses no bandwidth."""


class Pacer:
    """Says when the next bytes may be handed to the NIC. Pure: time comes in as an argument.

    Over any span of T seconds at most ``rate * (T + SLACK_S)`` bytes plus one grant start.

    Args:
        rate_bytes_s: bytes a second; infinite for no limit.

    Raises:
        ValueError: the rate is not positive.
    """

    def __init__(self, rate_bytes_s: float = math.inf) -> None:
        if not rate_bytes_s > 0:
            raise ValueError(f"a rate must be positive, got {rate_bytes_s}")
        self.rate_bytes_s = rate_bytes_s
        self._free_at = -math.inf

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return not math.isinf(self.rate_bytes_s)

    def wait_s(self, now: float) -> float:
        """Seconds from ``now`` until the next grant; 0 when it may be taken at once."""
        return max(0.0, self._free_at - now)

    def take(self, nbytes: int, now: float) -> None:
        """``nbytes`` are handed to the NIC now."""
        if self.limited:
            self._free_at = max(self._free_at, now - SLACK_S) + nbytes / self.rate_bytes_s
