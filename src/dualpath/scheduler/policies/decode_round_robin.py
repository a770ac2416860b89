"""DE selection of the baseline: every DE in turn, as long as the request fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualpath.config import Role
from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group


class Policy:
    """Phase 1: the group of the DE whose turn it is, round all active DEs that are large enough.
    Phase 2: turns go round the group's DEs, skipping those without room.

    A turn is one cursor: it is compared with ranks, which only grow, so engines that come and go
    do not make it jump back.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings
        self._last_placed = 0
        self._last_chosen: dict[str, int] = {}

    def place(self, need: int, cluster: Cluster) -> Group | None:
        """O(engines): a baseline, not meant for large clusters."""
        engine = _next(cluster.active[Role.DECODE], self._last_placed, lambda e: e.capacity >= need)
        if engine is None:
            return None
        self._last_placed = engine.rank
        return engine.group

    def open(self, group: Group, waiting_tokens: int) -> _Chooser:
        """O(1)."""
        del waiting_tokens
        return _Chooser(group, self._last_chosen)


class _Chooser:
    def __init__(self, group: Group, last: dict[str, int]) -> None:
        self._group = group
        self._last = last

    def choose(self, tokens: int, need: int) -> Engine | None:
        """O(engines of the group)."""
        del tokens
        last = self._last.get(self._group.name, 0)
        engine = _next(self._group.active, last, lambda e: e.free >= need)
        if engine is not None:
            self._last[self._group.name] = engine.rank
        return engine


def _next(
    engines: Sequence[Engine], after_rank: int, usable: Callable[[Engine], bool]
) -> Engine | None:
    """The first usable engine after ``after_rank`` in order of registration, going round."""
    later = (engine for engine in engines if engine.rank > after_rank and usable(engine))
    first = (engine for engine in engines if usable(engine))
    return next(later, None) or next(first, None)
