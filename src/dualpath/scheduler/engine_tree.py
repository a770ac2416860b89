"""Best DE for a request among many, in O(log engines).

The paper's rule asks for the least of one figure under limits on two others (requests, tokens, free
HBM). A tree over the engines keeps in every inner node the best of each figure below it, so whole
subtrees that cannot hold the answer are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dualpath.scheduler.state import Engine

# Keys are packed into integers, which compare faster than tuples and mean the same:
# (seq, tok, rank) and (tok, rank), most significant first.
_RANK_BITS: Final = 24
_TOK_BITS: Final = 40
_SEQ_SHIFT: Final = _RANK_BITS + _TOK_BITS
_NEVER: Final = 1 << 200


class EngineTree:
    """Engines whose loads change only by being chosen; built for one fetch.

    The engine returned last is looked at again at the next question, after its new load was booked.
    """

    __slots__ = ("_engines", "_free", "_last", "_order", "_size", "_tok")

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        size = 1
        while size < len(engines):
            size *= 2
        self._size = size
        padding = size - len(engines)
        self._free = free = [0] * size + [engine.free for engine in engines] + [-1] * padding
        self._tok = tok = [0] * size + [_tok_key(engine) for engine in engines]
        self._order = order = [0] * size + [_order_key(engine) for engine in engines]
        tok.extend([_NEVER] * padding)
        order.extend([_NEVER] * padding)
        for node in range(size - 1, 0, -1):
            left = 2 * node
            right = left + 1
            free[node] = free[left] if free[left] > free[right] else free[right]
            tok[node] = tok[left] if tok[left] < tok[right] else tok[right]
            order[node] = order[left] if order[left] < order[right] else order[right]
        self._last = -1

    def fewest_requests(self, need: int, tok_limit: int) -> Engine | None:
        """Least (seq, tok, rank) among engines with ``free >= need`` and ``tok <= tok_limit``."""
        if tok_limit < 0:
            return None
        return self._search(self._order, need, (tok_limit + 1) << _RANK_BITS)

    def least_tokens(self, need: int) -> Engine | None:
        """Least (tok, rank) among engines with ``free >= need``."""
        return self._search(self._tok, need, _NEVER)

    def _search(self, keys: list[int], need: int, tok_bound: int) -> Engine | None:
        """Depth first, the better half first; a half that cannot beat the best is passed over."""
        if self._last >= 0:
            self._refresh(self._last)
            self._last = -1
        free, tok, size = self._free, self._tok, self._size
        best, best_key = 0, _NEVER
        stack = [1]
        while stack:
            node = stack.pop()
            if keys[node] >= best_key or free[node] < need or tok[node] >= tok_bound:
                continue
            if node >= size:
                best, best_key = node, keys[node]
                continue
            left = 2 * node
            right = left + 1
            if keys[left] <= keys[right]:
                stack.append(right)
                stack.append(left)
            else:
                stack.append(left)
                stack.append(right)
        if not best:
            return None
        self._last = best - size
        return self._engines[self._last]

    def _refresh(self, index: int) -> None:
        free, tok, order = self._free, self._tok, self._order
        engine = self._engines[index]
        node = self._size + index
        free[node] = engine.free
        tok[node] = _tok_key(engine)
        order[node] = _order_key(engine)
        while node > 1:
            node //= 2
            left = 2 * node
            right = left + 1
            free[node] = free[left] if free[left] > free[right] else free[right]
            tok[node] = tok[left] if tok[left] < tok[right] else tok[right]
            order[node] = order[left] if order[left] < order[right] else order[right]


def _tok_key(engine: Engine) -> int:
    return engine.tok << _RANK_BITS | engine.rank


def _order_key(engine: Engine) -> int:
    return engine.seq << _SEQ_SHIFT | engine.tok << _RANK_BITS | engine.rank
