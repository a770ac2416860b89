"""How agents come."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How agents come; see ``run.simulate``.

    Raises:
        ValueError: a figure is out of range.
    """

    agents: int | None
    aps: float | None
    seed: int
    warmup_s: float
    measure_s: float
    until_steady: bool = False

    def __post_init__(self) -> None:
        if self.agents is not None and self.agents < 1:
            raise ValueError(f"agents must be at least 1, got {self.agents}")
        if self.aps is not None and not 0 < self.aps < math.inf:
            raise ValueError(f"aps must be above 0, got {self.aps}")
        if not 0 <= self.warmup_s < math.inf or not 0 < self.measure_s < math.inf:
            raise ValueError(
                f"warmup_s {self.warmup_s} must not be negative and measure_s {self.measure_s} "
                "must be above 0"
            )

        if self.until_steady and (self.aps is None or self.agents is not None):
            raise ValueError("until_steady is for online runs without a number of agents")

    @property
    def steady(self) -> bool:
        """Whether arrivals go on until the measurement is over."""
        return self.aps is not None and self.agents is None
