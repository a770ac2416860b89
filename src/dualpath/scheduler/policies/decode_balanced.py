"""DE selection of the paper: groups by total tokens, then fewest requests below average load."""

from __future__ import annotations

import math

from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.engine_levels import EngineLevels
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group


class Policy:
    """Phase 1: the group with the least total tok_e, its private queue included.

    Phase 2: Z = z_factor * (sum len(R) + sum tok_e) / |E|. Among the DEs with room, those with
    tok_e + len(r) <= Z by least seq_e (then least tok_e, then registered first); without any, the
    least tok_e (then registered first). Source: arXiv 2602.21548, section 6.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._z_factor = settings.z_factor

    def place(self, need: int, cluster: Cluster) -> Group | None:
        """O(log groups)."""
        return cluster.by_total.least(need)

    def open(self, group: Group, waiting_tokens: int) -> _Chooser:
        """O(engines of the group)."""
        average = (waiting_tokens + group.tok) / len(group.active)
        return _Chooser(group.active, math.floor(self._z_factor * average))


class _Chooser:
    def __init__(self, engines: list[Engine], z_tokens: int) -> None:
        self._levels = EngineLevels(engines)
        self._z_tokens = z_tokens

    def choose(self, tokens: int, need: int) -> Engine | None:
        """O(log engines) as a rule, see ``EngineLevels``."""
        levels = self._levels
        return levels.fewest_requests(need, self._z_tokens - tokens) or levels.least_tokens(need)
