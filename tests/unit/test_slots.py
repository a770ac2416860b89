"""The slot ledger: grants, fairness, I/O that outlives a lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from dualpath.transfer.errors import PoolTimeout, PoolTooSmall
from dualpath.transfer.slots import FREE_GENERATION, Lease, SlotPool

pytestmark = pytest.mark.unit

SOON_S = 5.0  # a deadline that is never reached in a passing test


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(8, 4096, "test buffer")
    yield pool
    pool.check_integrity()


def take(pool: SlotPool, owner: str, count: int) -> Lease:
    lease = pool.try_allocate(owner, count)
    assert lease is not None
    return lease


async def waiting(pool: SlotPool, owner: str, count: int) -> asyncio.Task[Lease]:
    """An ``allocate`` that has to wait, already in the queue."""
    before = pool.waiting
    task = asyncio.create_task(pool.allocate(owner, count, SOON_S))
    await asyncio.sleep(0)
    assert pool.waiting == before + 1 and not task.done()
    return task


def test_grant_and_release_count_every_slot(pool: SlotPool) -> None:
    a, b = take(pool, "a", 3), take(pool, "b", 2)
    assert (a.slots, b.slots) == ([0, 1, 2], [3, 4])
    assert (pool.used, pool.free, pool.draining) == (5, 3, 0)
    assert pool.owners() == {"a": 3, "b": 2}
    a.release([1])
    assert a.slots == [0, 1, 2] and a.held == {0, 2}
    a.release([1])
    a.release()
    a.release()
    assert (pool.used, pool.free) == (2, 6)
    with b:
        pass
    pool.assert_idle()


def test_foreign_slots_are_refused_and_nothing_changes(pool: SlotPool) -> None:
    a = take(pool, "a", 2)
    with pytest.raises(ValueError, match=r"\[5\]"):
        a.release([0, 5])
    assert a.held == {0, 1}
    a.release([0])
    with pytest.raises(ValueError, match="not held"):
        a.begin_io([0, 1])


def test_too_large_is_permanent_and_zero_is_free_of_charge(pool: SlotPool) -> None:
    with pytest.raises(PoolTooSmall, match="9 slots, test buffer has 8"):
        pool.try_allocate("a", 9)
    with pytest.raises(ValueError):
        pool.try_allocate("a", -1)
    assert take(pool, "a", 0).slots == []
    pool.assert_idle()


def test_released_under_io_drains_until_every_operation_ended(pool: SlotPool) -> None:
    lease = take(pool, "a", 3)
    first, second = lease.begin_io([0, 1]), lease.begin_io([1])
    lease.release()
    assert (pool.used, pool.draining, pool.free) == (0, 2, 6)
    assert pool.generation(1) == lease.generation
    other = take(pool, "b", 6)
    assert not {0, 1} & set(other.slots)
    assert pool.try_allocate("c", 1) is None
    first.end()
    first.end()
    assert first.ended and (pool.draining, pool.free) == (1, 1)
    second.end()
    assert pool.draining == 0 and pool.generation(1) == FREE_GENERATION
    with pytest.raises(AssertionError, match=r"held by \{'b': 6\}"):
        pool.assert_idle()
    again = take(pool, "c", 2)
    assert again.slots == [0, 1] and pool.generation(1) == again.generation != lease.generation


def test_io_that_ends_first_changes_nothing(pool: SlotPool) -> None:
    lease = take(pool, "a", 2)
    with lease.begin_io():
        assert pool.used == 2
    assert pool.used == 2
    lease.release()
    pool.assert_idle()


async def test_waits_for_draining_slots_too(pool: SlotPool) -> None:
    lease = take(pool, "a", 8)
    token = lease.begin_io([7])
    task = await waiting(pool, "b", 8)
    lease.release()
    await asyncio.sleep(0)
    assert not task.done()
    token.end()
    assert (await task).slots == list(range(8))


async def test_granted_in_order_of_arrival(pool: SlotPool) -> None:
    lease = take(pool, "a", 8)
    order: list[str] = []

    async def worker(name: str) -> None:
        with await pool.allocate(name, 8, SOON_S):
            order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "bcd":
            group.create_task(worker(name))
        await asyncio.sleep(0)
        lease.release()
    assert order == ["b", "c", "d"]
    pool.assert_idle()


async def test_huge_request_lets_its_own_size_pass_and_then_nobody(pool: SlotPool) -> None:
    held = take(pool, "old", 4)
    huge = await waiting(pool, "huge", 6)
    passed = 0
    for _ in range(20):  # one slot at a time, four slots are free all the while
        lease = pool.try_allocate("small", 1)
        if lease is None:
            break
        passed += 1
        lease.release()
    assert passed == 6 and pool.free == 4
    small = await waiting(pool, "small", 1)
    held.release()
    lease = await huge
    assert len(lease.slots) == 6
    assert len((await small).slots) == 1  # two were left over


async def test_small_request_is_not_starved_by_a_stream_of_others(pool: SlotPool) -> None:
    held = take(pool, "old", 8)
    small = await waiting(pool, "small", 1)
    rest = [await waiting(pool, f"later{i}", 8) for i in range(3)]
    held.release([3])
    assert (await small).slots == [3]
    assert not any(task.done() for task in rest)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    assert pool.waiting == 0


async def test_timeout_leaves_the_queue_and_serves_those_behind(pool: SlotPool) -> None:
    held = take(pool, "old", 4)
    huge = asyncio.create_task(pool.allocate("huge", 8, 0.02))
    await asyncio.sleep(0)
    for _ in range(2):
        take(pool, "small", 4).release()  # uses the huge one's allowance up
    behind = await waiting(pool, "behind", 4)
    with pytest.raises(PoolTimeout, match="8 of 8 slots"):
        await huge
    assert len((await behind).slots) == 4 and pool.waiting == 0
    held.release()


@pytest.mark.parametrize("granted_first", [False, True])
async def test_cancelled_wait_leaks_nothing(pool: SlotPool, granted_first: bool) -> None:
    held = take(pool, "old", 8)
    task = await waiting(pool, "gone", 5)
    behind = await waiting(pool, "behind", 8)
    if granted_first:
        held.release()  # the grant is made, but its task has not run yet
        assert pool.used == 5
        task.cancel()
    else:
        task.cancel()
        held.release()
        assert pool.used == 8  # "behind", at once
    with pytest.raises(asyncio.CancelledError):
        await task
    (await behind).release()
    pool.assert_idle()


async def test_cancelled_head_lets_those_behind_go(pool: SlotPool) -> None:
    take(pool, "old", 4)
    head = await waiting(pool, "head", 5)
    take(pool, "passing", 4).release()
    behind = await waiting(pool, "behind", 2)  # only 1 may still pass
    head.cancel()
    assert len((await behind).slots) == 2


def test_other_threads_may_not_change_it(pool: SlotPool) -> None:
    take(pool, "a", 1)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pool.try_allocate("b", 1)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(SOON_S)
    assert len(errors) == 1 and "another thread" in str(errors[0])
    assert pool.used == 1


def test_integrity_notices_a_slot_in_two_hands(pool: SlotPool) -> None:
    lease = take(pool, "a", 2)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="slot 0 is in 2 states"):
        pool.check_integrity()
    pool._free.remove(0)
    lease._held.add(5)
    with pytest.raises(AssertionError, match="slot 5"):
        pool.check_integrity()
    lease._held.remove(5)


def test_not_a_buffer() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        SlotPool(0, 1, "x")
