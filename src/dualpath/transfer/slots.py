"""Who owns which slot of a bounded buffer, and when a slot may be given to somebody else.

A pool is equal slots, numbered from 0. A slot is *free*, *used* (held by a lease), or *draining*:
released by its lease while a transfer or a file operation may still touch it. A draining slot is
nobody's to use and becomes free when the last operation on it is known to be over. That is the
rule that keeps a late write from landing in somebody else's KV.

Fairness. Requests are granted in the order they came, whole or not at all, with one bounded
exception: while a request waits for N slots, later ones that fit may overtake it as long as they
take N slots together, not more. So one huge request cannot idle the free slots while it waits for
a full buffer to drain, small ones (small N) are hardly ever overtaken, and nobody starves: after
N slots the free ones are saved up for the one at the front.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from dualpath.transfer.errors import PoolTimeout, PoolTooSmall

FREE_GENERATION: Final = 0


class IoToken:
    """An operation that may touch some slots of a lease. End it when it provably no longer does."""

    __slots__ = ("_pool", "_slots")

    def __init__(self, pool: SlotPool, slots: frozenset[int]) -> None:
        self._pool = pool
        self._slots = slots

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return not self._slots

    def end(self) -> None:
        """The operation is over; idempotent. Slots released meanwhile become free."""
        slots, self._slots = self._slots, frozenset()
        if slots:
            self._pool._end_io(slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Lease:
    """Slots granted together to one owner.

    Attributes:
        slots: the slots granted, ascending; ``release`` does not change the list, so an index
            into it stays valid for the lease's life.
        owner: who asked, for people to read.
        generation: number of this grant, unique in its pool; see ``SlotPool.generation``.
    """

    __slots__ = ("_held", "_pool", "generation", "owner", "slots")

    def __init__(self, pool: SlotPool, owner: str, slots: list[int], generation: int) -> None:
        self._pool = pool
        self._held = set(slots)
        self.owner = owner
        self.slots = slots
        self.generation = generation

    @property
    def held(self) -> frozenset[int]:
        """Slots not released yet."""
        return frozenset(self._held)

    def release(self, slots: Iterable[int] | None = None) -> None:
        """Give slots back (all when None). What was given back before is passed over.

        Raises:
            ValueError: a slot never belonged to this lease; nothing is released then.
        """
        chosen = set(self.slots) if slots is None else set(slots)
        foreign = chosen.difference(self.slots)
        if foreign:
            raise ValueError(f"slots {sorted(foreign)} are not of the lease of {self.owner}")
        chosen &= self._held
        if chosen:
            self._pool._release(self, chosen)

    def begin_io(self, slots: Iterable[int] | None = None) -> IoToken:
        """Note that an operation may touch slots (all held ones when None) until the token ends.

        Raises:
            ValueError: a slot is not held by this lease (any more).
        """
        chosen = frozenset(self._held) if slots is None else frozenset(slots)
        gone = chosen - self._held
        if gone:
            raise ValueError(f"slots {sorted(gone)} are not held by the lease of {self.owner}")
        return self._pool._begin_io(chosen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: str
    count: int
    granted: asyncio.Future[Lease]
    allowance: int
    """Slots that later requests may still take before this one is served."""


class SlotPool:
    """A bounded buffer of equal slots, as a ledger: it moves no bytes.

    Belongs to one thread, the first that changes it; another one's change raises RuntimeError.
    Reading the counts is safe from anywhere.

    Args:
        slots: number of slots, at least 1.
        slot_bytes: bytes in each.
        name: for messages and metrics.
    """

    def __init__(self, slots: int, slot_bytes: int, name: str) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"{name}: {slots} slots of {slot_bytes} bytes is not a buffer")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.name = name
        # A heap, so that grants are low and dense and neighbours merge into one descriptor.
        self._free = list(range(slots))
        self._holder: list[Lease | None] = [None] * slots
        self._io = [0] * slots
        self._generation = [FREE_GENERATION] * slots
        self._grants = 0
        self._draining: set[int] = set()
        self._waiters: deque[_Waiter] = deque()
        self._thread: int | None = None

    # ---- counts -------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Slots that can be granted."""
        return len(self._free)

    @property
    def draining(self) -> int:
        """Slots released but still under I/O."""
        return len(self._draining)

    @property
    def used(self) -> int:
        """Slots held by leases."""
        return self.slots - len(self._free) - len(self._draining)

    @property
    def waiting(self) -> int:
        """Requests waiting for room."""
        return sum(not waiter.granted.done() for waiter in self._waiters)

    def generation(self, slot: int) -> int:
        """``Lease.generation`` of the grant that holds the slot, kept while it drains;
        ``FREE_GENERATION`` while it is free. A slot granted again never has an old value."""
        return self._generation[slot]

    def owners(self) -> dict[str, int]:
        """Slots held, by owner."""
        return dict(Counter(lease.owner for lease in self._holder if lease is not None))

    # ---- taking -------------------------------------------------------------------------------

    async def allocate(self, owner: str, count: int, timeout_s: float) -> Lease:
        """Wait for ``count`` slots; cancelling the wait leaves nothing behind.

        Raises:
            PoolTooSmall: the pool has fewer slots than that.
            PoolTimeout: not granted within ``timeout_s`` seconds.
            ValueError: ``count`` is negative.
        """
        lease = self.try_allocate(owner, count)
        if lease is not None:
            return lease
        loop = asyncio.get_running_loop()
        waiter = _Waiter(owner, count, loop.create_future(), allowance=count)
        self._waiters.append(waiter)
        timer = loop.call_later(timeout_s, self._expire, waiter, timeout_s)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            timer.cancel()

    def try_allocate(self, owner: str, count: int) -> Lease | None:
        """``count`` slots now, or None. Overtakes those waiting only as far as fairness allows.

        Raises:
            PoolTooSmall: the pool has fewer slots than that.
            ValueError: ``count`` is negative.
        """
        self._check_thread()
        if count < 0:
            raise ValueError(f"{self.name}: cannot grant {count} slots")
        if count > self.slots:
            raise PoolTooSmall(f"{owner} needs {count} slots, {self.name} has {self.slots}")
        waiting = [waiter for waiter in self._waiters if not waiter.granted.done()]
        if count > self.free or any(waiter.allowance < count for waiter in waiting):
            return None
        return self._grant(owner, count, waiting)

    def _grant(self, owner: str, count: int, overtaken: Sequence[_Waiter]) -> Lease:
        for waiter in overtaken:
            waiter.allowance -= count
        self._grants += 1
        slots = [heapq.heappop(self._free) for _ in range(count)]
        lease = Lease(self, owner, slots, self._grants)
        for slot in slots:
            self._holder[slot] = lease
            self._generation[slot] = lease.generation
        return lease

    def _serve(self) -> None:
        """Grant to those waiting, in order, whoever may be granted now."""
        left: list[_Waiter] = []
        allowance = self.slots
        for waiter in self._waiters:
            if waiter.granted.done():
                continue  # cancelled; its task has not run yet
            if waiter.count <= min(self.free, allowance):
                waiter.granted.set_result(self._grant(waiter.owner, waiter.count, left))
                allowance -= waiter.count
            else:
                left.append(waiter)
                allowance = min(allowance, waiter.allowance)
        self._waiters = deque(left)

    def _expire(self, waiter: _Waiter, timeout_s: float) -> None:
        if waiter.granted.done():
            return
        self._waiters.remove(waiter)
        waiter.granted.set_exception(
            PoolTimeout(
                f"{waiter.owner} waited {timeout_s:g} s for {waiter.count} of {self.slots} slots "
                f"of {self.name} ({self.free} free, {self.draining} draining)"
            )
        )
        self._serve()

    def _abandon(self, waiter: _Waiter) -> None:
        if not waiter.granted.cancelled():
            # Granted in the same turn of the loop in which the wait was cancelled. (An expiry
            # in that turn left nothing to give back.)
            if waiter.granted.exception() is None:
                waiter.granted.result().release()
            return
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self._serve()

    # ---- giving back --------------------------------------------------------------------------

    def _release(self, lease: Lease, slots: set[int]) -> None:
        self._check_thread()
        lease._held -= slots
        for slot in slots:
            self._holder[slot] = None
            if self._io[slot]:
                self._draining.add(slot)
            else:
                self._make_free(slot)
        self._serve()

    def _begin_io(self, slots: frozenset[int]) -> IoToken:
        self._check_thread()
        for slot in slots:
            self._io[slot] += 1
        return IoToken(self, slots)

    def _end_io(self, slots: frozenset[int]) -> None:
        self._check_thread()
        for slot in slots:
            self._io[slot] -= 1
            if not self._io[slot] and slot in self._draining:
                self._draining.remove(slot)
                self._make_free(slot)
        self._serve()

    def _make_free(self, slot: int) -> None:
        self._generation[slot] = FREE_GENERATION
        heapq.heappush(self._free, slot)

    # ---- checks -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Recount everything from the slots up.

        Raises:
            AssertionError: a slot is lost, owned twice, or free while under I/O.
        """
        free = set(self._free)
        held: Counter[int] = Counter()
        for lease in {id(lease): lease for lease in self._holder if lease}.values():
            held.update(lease._held)
        for slot in range(self.slots):
            lease_of = self._holder[slot]
            states = (slot in free) + (slot in self._draining) + (lease_of is not None)
            _require(states == 1, f"slot {slot} is in {states} states")
            _require(held[slot] == (lease_of is not None), f"slot {slot}: {held[slot]} owners")
            _require(self._io[slot] >= 0, f"slot {slot}: more I/O ended than begun")
            _require(not (slot in free and self._io[slot]), f"slot {slot} is free under I/O")
            _require(
                (slot in free) == (self._generation[slot] == FREE_GENERATION),
                f"slot {slot}: generation {self._generation[slot]}",
            )
            if slot in self._draining:
                _require(self._io[slot] > 0, f"slot {slot} drains nothing")
        _require(len(self._free) == len(free), "a slot is free twice")
        _require(self.used + self.free + self.draining == self.slots, "slots are lost")
        for waiter in self._waiters:
            _require(waiter.allowance >= 0, f"{waiter.owner} was overtaken too far")

    def assert_idle(self) -> None:
        """Check that everything is free and nobody waits.

        Raises:
            AssertionError: something is held, draining or waited for; says by whom.
        """
        self.check_integrity()
        _require(
            self.free == self.slots and not self.waiting,
            f"{self.name} is not idle: held by {self.owners()}, {self.draining} draining, "
            f"{self.waiting} waiting",
        )

    def _check_thread(self) -> None:
        current = threading.get_ident()
        if self._thread is None:
            self._thread = current
        elif self._thread != current:
            raise RuntimeError(f"{self.name} belongs to another thread")


def _require(condition: bool, message: str) -> None:
    # Not ``assert``: these must hold under -O too, and tests rely on them.
    if not condition:
        raise AssertionError(message)
