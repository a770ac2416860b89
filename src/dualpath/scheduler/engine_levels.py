"""Best DE for a request among many, without looking at every engine.

The paper's rule asks for the least seq_e under limits on two other figures (tokens, free HBM).
Engines of equal seq_e form a level, ordered by tokens: if the first engine of a level has too many
tokens, all have, so a question costs a few comparisons a level, and levels are few because the rule
itself keeps the engines' seq_e close together.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpath.scheduler.state import Engine

_Item = tuple[int, int, Engine]
"""Tokens, rank, engine: compares as the rule does."""


@dataclass(slots=True)
class _Level:
    """Engines of one seq_e: a heap of ``(tok, rank, engine)``, outdated once the engine's seq has
    moved on, and a bound that no engine's free HBM is above."""

    heap: list[_Item] = field(default_factory=list)
    room: int = 0


class EngineLevels:
    """Engines whose loads change only by being chosen; built for one fetch.

    The engine returned last is booked by the caller and takes its new place at the next question.
    A question costs O(levels + log engines), plus one look through a level whose least loaded
    engine lacks the HBM that another one there has.
    """

    __slots__ = ("_chosen", "_levels", "_seqs")

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._levels: dict[int, _Level] = {}
        self._seqs: list[int] = []
        self._chosen: Engine | None = None
        for engine in engines:
            level = self._level(engine.seq)
            level.heap.append((engine.tok, engine.rank, engine))
            if engine.free > level.room:
                level.room = engine.free
        for level in self._levels.values():
            heapq.heapify(level.heap)

    def fewest_requests(self, need: int, tok_limit: int) -> Engine | None:
        """Least (seq, tok, rank) among engines with ``free >= need`` and ``tok <= tok_limit``."""
        self._settle()
        levels = self._levels
        for seq in self._seqs:
            level = levels[seq]
            heap = level.heap
            if heap and heap[0][0] <= tok_limit and level.room >= need:
                found = _least(level, seq, need)
                if found is not None and found[0] <= tok_limit:
                    self._chosen = found[2]
                    return found[2]
        return None

    def least_tokens(self, need: int) -> Engine | None:
        """Least (tok, rank) among engines with ``free >= need``."""
        self._settle()
        levels = self._levels
        best: _Item | None = None
        for seq in self._seqs:
            level = levels[seq]
            heap = level.heap
            if heap and level.room >= need and (best is None or heap[0] < best):
                found = _least(level, seq, need)
                if found is not None and (best is None or found < best):
                    best = found
        if best is None:
            return None
        self._chosen = best[2]
        return best[2]

    def _level(self, seq: int) -> _Level:
        level = self._levels.get(seq)
        if level is None:
            level = self._levels[seq] = _Level()
            insort(self._seqs, seq)
        return level

    def _settle(self) -> None:
        """Put the engine chosen last where its new figures belong."""
        engine = self._chosen
        if engine is not None:
            self._chosen = None
            level = self._level(engine.seq)
            heapq.heappush(level.heap, (engine.tok, engine.rank, engine))
            if engine.free > level.room:
                level.room = engine.free


def _least(level: _Level, seq: int, need: int) -> _Item | None:
    """Least (tok, rank) with room among the engines that are still of this level."""
    heap = level.heap
    while heap and heap[0][2].seq != seq:
        heapq.heappop(heap)
    if heap and heap[0][2].free >= need:
        return heap[0]
    # The least loaded one has no room: look at all, and remember how much room there is, so that
    # a level without any is not looked through again.
    here = [item for item in heap if item[2].seq == seq]
    level.room = max((item[2].free for item in here), default=0)
    return min((item for item in here if item[2].free >= need), default=None)
