"""PE selection of the paper: least tokens, engines with a short disk read queue first."""

from __future__ import annotations

import heapq
from typing import Final

from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group

_SCANS: Final = 5
"""Requests of a fetch from which on sorting the engines pays."""


class Policy:
    """Three categories, by the engine's tokens and its node's read queue.

    Overloaded (tok_e > beta): nothing. Short queue (read_q <= alpha) before long queue
    (read_q > alpha); within each the least tok_e, then the engine registered first.
    Source: arXiv 2602.21548, section 6.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._alpha = settings.alpha_tokens
        self._beta = settings.beta_tokens

    def open(self, group: Group, cluster: Cluster) -> _Chooser:
        """O(engines of the group)."""
        del cluster
        return _Chooser(group.active, self._alpha, self._beta)


class _Chooser:
    """Looks at every engine for the first few requests, since that is cheaper than to sort them,
    and sorts them for the rest. Both give the same engine.

    Sorted: one heap a category, of ``(tok_e, rank, engine)``. Loads and read queues only rise
    during a fetch, so an entry can only be too small, or in the short heap while its node's queue
    has grown long: both are put right when it comes to the top.
    """

    def __init__(self, engines: list[Engine], alpha: int, beta: int) -> None:
        self._engines = engines
        self._alpha = alpha
        self._beta = beta
        self._scans = _SCANS
        self._short: list[tuple[int, int, Engine]] = []
        self._long: list[tuple[int, int, Engine]] = []

    def choose(self, tokens: int) -> Engine | None:
        """Amortised O(log engines)."""
        del tokens  # a request may lift an engine above beta: only what it had before counts
        if self._scans:
            self._scans -= 1
            if not self._scans:
                self._sort()
            else:
                return self._scan()
        return self._from_heaps()

    def _scan(self) -> Engine | None:
        short: Engine | None = None
        long: Engine | None = None
        short_tok = long_tok = 0
        alpha, beta = self._alpha, self._beta
        for engine in self._engines:  # by rank
            tok = engine.tok
            if tok > beta:
                continue
            if engine.node.read_q <= alpha:
                if short is None or tok < short_tok:
                    short, short_tok = engine, tok
            elif short is None and (long is None or tok < long_tok):
                long, long_tok = engine, tok
        return long if short is None else short

    def _sort(self) -> None:
        alpha, beta = self._alpha, self._beta
        usable = [(one.tok, one.rank, one) for one in self._engines if one.tok <= beta]
        self._short = [entry for entry in usable if entry[2].node.read_q <= alpha]
        self._long = [entry for entry in usable if entry[2].node.read_q > alpha]
        heapq.heapify(self._short)
        heapq.heapify(self._long)

    def _from_heaps(self) -> Engine | None:
        heap = self._short
        while heap:
            tok, rank, engine = heap[0]
            if engine.node.read_q > self._alpha:
                heapq.heappop(heap)
                heapq.heappush(self._long, (engine.tok, rank, engine))
            elif engine.tok == tok:
                return engine
            else:
                self._correct(heap, rank, engine)
        heap = self._long
        while heap:
            tok, rank, engine = heap[0]
            if engine.tok == tok:
                if tok <= self._beta:
                    return engine
                heapq.heappop(heap)  # came over from the short heap overloaded
            else:
                self._correct(heap, rank, engine)
        return None

    def _correct(self, heap: list[tuple[int, int, Engine]], rank: int, engine: Engine) -> None:
        if engine.tok > self._beta:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (engine.tok, rank, engine))
