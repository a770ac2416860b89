"""PE selection of the baseline: every PE in turn, whatever its load."""

from __future__ import annotations

from dualpath.config import Role
from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group


class Policy:
    """Turns go round all active PEs of the cluster, so that the balance of the baseline does not
    depend on which group happens to fetch first; the thresholds are not looked at."""

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings
        self._turn = 0
        self._engines: list[Engine] = []

    def open(self, group: Group, cluster: Cluster) -> Policy:
        """O(1)."""
        del group
        self._engines = cluster.active[Role.PREFILL]
        return self

    def choose(self, tokens: int) -> Engine | None:
        """O(1)."""
        del tokens
        engine = self._engines[self._turn % len(self._engines)]
        self._turn += 1
        return engine
