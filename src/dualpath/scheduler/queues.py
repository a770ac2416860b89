"""Where requests wait: the PE FIFO, and the global, private and parked queues of the DE side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.policies.protocols import DecodePolicy
from dualpath.scheduler.state import Entry, Queue


class Queues:
    """All in order of arrival, always. Not thread safe; one owner.

    Attributes:
        fifo: without a PE.
        arrived: without a DE and not handed to a group yet: the global queue.
        parked: without a DE, and no active one could hold them.

    A group's private queue is in the group.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.fifo: Queue = OrderedDict()
        self.arrived: Queue = OrderedDict()
        self.parked: Queue = OrderedDict()
        self._queued_again = False  # ``arrived`` may hold some older than those placed already

    def add(self, entry: Entry) -> None:
        """A new request waits for both sides."""
        self.fifo[entry.rid] = self.arrived[entry.rid] = entry

    def discard(self, entry: Entry) -> None:
        """Take a request out of wherever it waits."""
        self.fifo.pop(entry.rid, None)
        if entry.group is not None:
            self._leave_group(entry)
        elif self.arrived.pop(entry.rid, None) is None:
            self.parked.pop(entry.rid, None)

    def place(self, policy: DecodePolicy) -> None:
        """DE phase 1: empty the global queue into the groups' private ones."""
        arrived, choose, cluster = self.arrived, policy.place, self._cluster
        taken = 0
        try:
            for rid, entry in arrived.items():
                group = choose(entry.need, cluster)
                taken += 1
                if group is None:
                    self.parked[rid] = entry
                else:
                    entry.group = group
                    group.queue[rid] = entry
                    group.queued += entry.tokens
        finally:
            drop_first(arrived, taken)
        if self._queued_again:
            self._queued_again = False
            _merge(self.parked, ())
            for group in cluster.groups.values():
                _merge(group.queue, ())

    def again_for_prefill(self, entries: Iterable[Entry]) -> None:
        """These lost their PE."""
        _merge(self.fifo, entries)

    def again_for_decode(self, entries: Iterable[Entry]) -> None:
        """These lost their DE, or the group they waited in is too small for them now."""
        back = list(entries)
        for entry in back:
            if entry.group is not None:
                self._leave_group(entry)
        _merge(self.arrived, back)
        self._queued_again = True

    def unpark(self) -> None:
        """A DE joined: look again at those that none could hold."""
        if self.parked:
            parked = list(self.parked.values())
            self.parked.clear()
            self.again_for_decode(parked)

    def larger_than(self, hbm_tokens: int) -> list[Entry]:
        """Waiting requests outside the private queues that need more HBM than that."""
        waiting = [*self.arrived.values(), *self.parked.values()]
        return sorted((entry for entry in waiting if entry.need > hbm_tokens), key=arrival_of)

    def _leave_group(self, entry: Entry) -> None:
        group = entry.group
        assert group is not None
        del group.queue[entry.rid]
        group.queued -= entry.tokens
        entry.group = None
        self._cluster.by_total.fell(group)


def arrival_of(entry: Entry) -> int:
    """Sort key: order of arrival."""
    return entry.arrival


def drop_first(queue: Queue, count: int) -> None:
    """Remove the first ``count`` requests."""
    for _ in range(count):
        queue.popitem(last=False)


def _merge(queue: Queue, entries: Iterable[Entry]) -> None:
    """Put requests back where they belong by arrival. O(n log n); rare."""
    ordered = sorted([*queue.values(), *entries], key=arrival_of)
    queue.clear()
    queue.update((entry.rid, entry) for entry in ordered)
