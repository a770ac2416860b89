"""Sharing a buffer between huge and small requests, in logical time: whoever waits is overtaken by
no more than its own size, and nobody waits longer than that and one drain of the buffer take."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.config import parse
from dualpath.engine.assemble import _arena
from dualpath.transfer.slots import Lease, SlotPool

pytestmark = pytest.mark.unit

FOREVER_S = 600.0


@dataclass
class Asked:
    """One request: when it came, how many slots, how long it holds them; what became of it."""

    at: int
    slots: int
    holds: int
    granted_at: int = -1
    overtaken_by: int = 0


@dataclass
class Buffer:
    """A pool in logical time."""

    pool: SlotPool
    now: int = 0
    waiting: list[Asked] = field(default_factory=list)
    releases: list[tuple[int, int, Lease]] = field(default_factory=list)
    most_used: int = 0
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, requests: list[Asked]) -> None:
        arrivals = sorted(requests, key=lambda asked: asked.at)
        tasks: list[asyncio.Task[None]] = []
        while arrivals or self.releases:
            comes = arrivals[0].at if arrivals else None
            goes = self.releases[0][0] if self.releases else None
            if goes is not None and (comes is None or goes <= comes):
                self.now, _, lease = heapq.heappop(self.releases)
                lease.release()
            else:
                asked = arrivals.pop(0)
                self.now = asked.at
                tasks.append(asyncio.create_task(self._ask(asked)))
            for _ in range(4):
                await asyncio.sleep(0)
            self.most_used = max(self.most_used, self.pool.used)
            self.pool.check_integrity()
        await asyncio.gather(*tasks)

    async def _ask(self, asked: Asked) -> None:
        self.waiting.append(asked)
        lease = await self.pool.allocate(f"at {asked.at}", asked.slots, FOREVER_S)
        self.waiting.remove(asked)
        asked.granted_at = self.now
        for other in self.waiting:
            if other.at < asked.at:
                other.overtaken_by += asked.slots
        heapq.heappush(self.releases, (self.now + asked.holds, next(self._serial), lease))


requests = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 4), st.integers(1, 10)), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None)
@given(
    small=requests,
    huge=st.lists(st.tuples(st.integers(0, 200), st.integers(20, 32)), max_size=3),
)
def test_nobody_starves_and_nobody_is_held_up_for_long(
    small: list[tuple[int, int, int]], huge: list[tuple[int, int]]
) -> None:
    pool = SlotPool(32, 4096, "buffer")
    asked = [Asked(at, slots, holds) for at, slots, holds in small]
    asked += [Asked(at, slots, 10) for at, slots in huge]
    # Arrivals at one moment would make "before" ambiguous.
    for number, one in enumerate(sorted(asked, key=lambda one: one.at)):
        one.at = one.at * 100 + number
        one.holds *= 100
    buffer = Buffer(pool)
    asyncio.run(buffer.run(asked))
    pool.assert_idle()
    assert buffer.most_used <= 32
    longest = 1000
    for one in asked:
        assert one.granted_at >= 0, "nobody starves"
        assert one.overtaken_by <= one.slots, "overtaken by no more than its own size"
        # Those before it that hold or wait, what overtakes it, and itself, each at most a drain.
        ahead = sum(other.slots for other in asked if other.at < one.at) + one.overtaken_by
        assert one.granted_at - one.at <= longest * (2 + 2 * ahead // 32)


async def test_small_hits_pass_while_a_huge_one_waits_for_the_buffer_to_drain() -> None:
    """24 of 32 slots are held for long. A request for all 32 waits; small ones go on in the eight
    free slots, 32 slots of them in all, then the rest is saved up."""
    pool = SlotPool(32, 4096, "buffer")
    holder = Asked(0, 24, 1000)
    huge = Asked(1, 32, 10)
    small = [Asked(10 + 10 * number, 2, 10) for number in range(40)]
    buffer = Buffer(pool)
    await buffer.run([holder, huge, *small])
    passed = [one for one in small if one.granted_at < huge.granted_at]
    assert sum(one.slots for one in passed) == huge.slots
    assert all(one.granted_at == one.at for one in passed), "without waiting at all"
    assert huge.granted_at == 1000, "as soon as the holder left"
    assert all(one.granted_at >= 0 for one in small)
    pool.assert_idle()


@given(st.integers(4096, 10**7), st.integers(1, 1024))
@settings(max_examples=50, deadline=None)
def test_a_buffer_takes_no_byte_more_than_its_budget(budget: int, pages: int) -> None:
    slot_bytes = min(pages * 4096, budget)
    arena = _arena(budget, slot_bytes, "buffers.prefill")
    try:
        assert budget - slot_bytes < arena.region.nbytes <= budget
        assert arena.pool.slots * slot_bytes == arena.region.nbytes
        last = arena.view(arena.pool.slots - 1)
        assert len(last) == slot_bytes
    finally:
        last.release()
        arena.region.close()


def test_budgets_are_bytes_as_written() -> None:
    described = parse(
        {
            "model": {"path": "m"},
            "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
            "buffers": {"prefill": "1000001B"},
        }
    )
    assert int(described.buffers.prefill) == 1_000_001
