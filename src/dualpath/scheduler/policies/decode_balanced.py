"""DE selection of the paper: groups by total tokens, then fewest requests below average load."""

from __future__ import annotations

import math
from typing import Final

from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.engine_levels import EngineLevels
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group

_SCANS: Final = 6
"""Requests of a fetch after which sorting the engines pays."""


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
    """Looks at every engine for the first few requests, since that is cheaper than to sort them,
    and sorts them for the rest. Both give the same engine."""

    def __init__(self, engines: list[Engine], z_tokens: int) -> None:
        self._engines = engines
        self._levels: EngineLevels | None = None
        self._scans = _SCANS
        self._z_tokens = z_tokens

    def choose(self, tokens: int, need: int) -> Engine | None:
        """O(log engines) as a rule, see ``EngineLevels``."""
        limit = self._z_tokens - tokens
        levels = self._levels
        if levels is None:
            if self._scans:
                self._scans -= 1
                return _scan(self._engines, need, limit)
            levels = self._levels = EngineLevels(self._engines)
        return levels.fewest_requests(need, limit) or levels.least_tokens(need)


def _scan(engines: list[Engine], need: int, tok_limit: int) -> Engine | None:
    """Least (seq, tok, rank) of those with room and at most ``tok_limit`` tokens, else least
    (tok, rank) of those with room."""
    low: Engine | None = None
    high: Engine | None = None
    low_seq = low_tok = high_tok = 0
    for engine in engines:  # by rank
        if engine.free < need:
            continue
        tok = engine.tok
        if tok <= tok_limit:
            seq = engine.seq
            if low is None or seq < low_seq or (seq == low_seq and tok < low_tok):
                low, low_seq, low_tok = engine, seq, tok
        elif low is None and (high is None or tok < high_tok):
            high, high_tok = engine, tok
    return high if low is None else low
