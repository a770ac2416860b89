"""The DE group with the least total, in O(log groups)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from dualpath.scheduler.state import Group


class GroupIndex:
    """A heap of groups whose keys may rise in silence but whose falls are announced.

    Every group has one live entry, whose key (``Group.index_key``) is never above its total. An
    entry that comes to the top with an outdated key is moved down to the current one; one that is
    not the live entry any more is thrown away. Ties go to the group registered first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Group]] = []
        self._groups = 0

    def rebuild(self, groups: Iterable[Group]) -> None:
        """Index exactly ``groups``, after one joined, left or changed its members."""
        self._heap = []
        for group in groups:
            group.index_key = group.total
            self._heap.append((group.index_key, group.rank, group))
        self._groups = len(self._heap)
        heapq.heapify(self._heap)

    def fell(self, group: Group) -> None:
        """Tell that the total of ``group`` may have gone down. Amortised O(log groups)."""
        total = group.total
        if total < group.index_key and group.active:
            group.index_key = total
            heapq.heappush(self._heap, (total, group.rank, group))
            if len(self._heap) > 2 * self._groups + 64:
                self.rebuild({entry[2].rank: entry[2] for entry in self._heap}.values())

    def least(self, need: int) -> Group | None:
        """The group with the least total among those with a DE of ``need`` tokens of HBM.

        O(log groups) when all groups can hold it, O(groups) for a request that some cannot.
        """
        heap = self._heap
        while heap:
            key, rank, group = heap[0]
            if key != group.index_key:
                heapq.heappop(heap)
                continue
            total = group.total
            if key != total:
                group.index_key = total
                heapq.heapreplace(heap, (total, rank, group))
                continue
            if group.largest >= need:
                return group
            return self._least_large(need)
        return None

    def _least_large(self, need: int) -> Group | None:
        large = {entry[2].rank: entry[2] for entry in self._heap if entry[2].largest >= need}
        return min(large.values(), key=lambda group: (group.total, group.rank), default=None)
