"""How evenly work is spread: read rates of the nodes, attention time of the prefill engines."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from dualpath.config import ClusterConfig, Role
from dualpath.serve.members import Members
from dualpath.serve.rates import RateWindow, difference_ratio, max_over_mean

_WINDOW_S: Final = 60.0
_SAMPLE_S: Final = 1.0


class Balance:
    """Samples the engines' totals and keeps their rates over the last minute. Belongs to the
    event loop."""

    def __init__(self, config: ClusterConfig, members: Members) -> None:
        self._config = config
        self._members = members
        self._reads = RateWindow(_WINDOW_S)
        self._attention = RateWindow(_WINDOW_S)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(_SAMPLE_S)

    def sample(self, now_s: float) -> None:
        """Take the totals as the latest reports have them."""
        totals = self._members.total("storage_read_bytes")
        # A node without engines reads nothing, which is a difference too.
        self._reads.add(now_s, {node.name: totals.get(node.name, 0) for node in self._config.nodes})
        self._attention.add(
            now_s,
            {
                member.name: member.stats.counters.get("attention_seconds", 0.0)
                for member in self._members.all()
                if member.role is Role.PREFILL
            },
        )

    def figures(self) -> dict[str, float]:
        """One number each."""
        return {
            "snic_read_difference_ratio": difference_ratio(self._reads.per_second()),
            "attention_max_over_mean_ratio": max_over_mean(self._attention.per_second()),
        }

    def by_node(self) -> dict[str, dict[str, float]]:
        """Per node: the rate, and the limit where there is one."""
        return {
            "snic_read_bytes_per_second": self._reads.per_second(),
            "snic_read_limit_bytes_per_second": {
                node.name: float(node.snic.read)
                for node in self._config.nodes
                if node.snic.read.limited
            },
        }
