"""PE selection beyond the paper: least computation ahead, among all PEs of the cluster."""

from __future__ import annotations

import heapq
from typing import Final

from dualpath.config import Role
from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group

_SCANS: Final = 2
"""Requests of a fetch from which on sorting the engines pays."""

_Key = tuple[bool, int, int, int]


class Policy:
    """Two things differ from the paper's rule, and its categories stay (overloaded: tok_e > beta;
    short read queue before long).

    Load is what must still be computed, not what was assigned: the miss tokens of the engine plus
    their mean over its group, because the engines of a group step together. A prompt of 30,000
    stored tokens is a short piece of work, and one of 5,000 new tokens a long one; tok_e says the
    opposite.

    Whichever group fetches, the head goes to the least loaded PE of the whole cluster: where PEs
    are several groups, the paper's rule gives everything that waits to the one that happens to
    fetch first. Like a request whose DE is found last, it reaches its PE without that PE asking.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._alpha = settings.alpha_tokens
        self._beta = settings.beta_tokens

    def open(self, group: Group, cluster: Cluster) -> _Chooser:
        """O(1)."""
        del group
        return _Chooser(cluster.active[Role.PREFILL], self._alpha, self._beta)


class _Chooser:
    """Looks at every engine for the first requests and sorts them for the rest; both give the same
    engine. Nothing falls during a fetch, so an entry of the heap can only be too small, and is put
    right when it comes to the top."""

    def __init__(self, engines: list[Engine], alpha: int, beta: int) -> None:
        self._engines = engines
        self._alpha = alpha
        self._beta = beta
        self._scans = _SCANS
        self._heap: list[tuple[_Key, Engine]] = []

    def choose(self, tokens: int) -> Engine | None:
        """O(PEs) for the first requests of a fetch, then O(log PEs) unless a group's mean has
        moved."""
        del tokens  # a request may lift an engine above beta: only what it had before counts
        if self._scans:
            self._scans -= 1
            usable = (one for one in self._engines if one.tok <= self._beta)
            return min(usable, key=self._key, default=None)
        heap = self._heap
        if not heap:
            heap.extend((self._key(one), one) for one in self._engines if one.tok <= self._beta)
            heapq.heapify(heap)
        while heap:
            known, engine = heap[0]
            if engine.tok > self._beta:
                heapq.heappop(heap)
                continue
            key = self._key(engine)
            if key == known:
                return engine
            heapq.heapreplace(heap, (key, engine))
        return None

    def _key(self, engine: Engine) -> _Key:
        group, read_q = engine.group, engine.node.read_q
        work = engine.miss + group.miss // len(group.active)
        return (read_q > self._alpha, work, read_q, engine.rank)
