"""The slot ledger against a model, under any order of grants, releases, I/O, waits and cancels."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from dualpath.transfer.slots import IoToken, Lease, SlotPool

pytestmark = pytest.mark.unit


class SlotMachine(RuleBasedStateMachine):
    """The model: which slots each lease holds, and which slots each token touches."""

    leases = Bundle("leases")
    tokens = Bundle("tokens")
    waits = Bundle("waits")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.held: dict[Lease, set[int]] = {}
        self.io: dict[IoToken, frozenset[int]] = {}
        self.pending: list[asyncio.Task[Lease]] = []
        self.generations: set[int] = set()

    @initialize(slots=st.integers(1, 12))
    def make(self, slots: int) -> None:
        self.pool = SlotPool(slots, 4096, "machine")

    def teardown(self) -> None:
        """Whatever happened, ending everything makes the pool idle again."""
        for task in self.pending:
            task.cancel()
        self.settle()
        for lease in list(self.held):
            lease.release()
        for token in list(self.io):
            token.end()
        if hasattr(self, "pool"):
            self.pool.assert_idle()
        self.loop.close()

    def settle(self) -> None:
        """Let every task of the loop run, and take over what was granted."""
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.pending if task.done()]:
            self.pending.remove(task)
            if not task.cancelled() and task.exception() is None:
                self.adopt(task.result())

    def adopt(self, lease: Lease) -> None:
        busy = set().union(*self.held.values(), *self.io.values())
        assert not busy & set(lease.slots), "granted a slot that is held or under I/O"
        assert lease.generation not in self.generations
        self.generations.add(lease.generation)
        self.held[lease] = set(lease.slots)

    @rule(target=leases, count=st.integers(0, 12))
    def try_allocate(self, count: int) -> object:
        if count > self.pool.slots:
            return multiple()
        lease = self.pool.try_allocate("try", count)
        if lease is None:
            assert count > self.pool.free or self.pool.waiting
            return multiple()
        self.adopt(lease)
        return lease

    @rule(target=waits, count=st.integers(1, 12), expired=st.booleans())
    def allocate(self, count: int, expired: bool) -> object:
        if count > self.pool.slots:
            return multiple()
        task = self.loop.create_task(
            self.pool.allocate(f"wait{count}", count, 0.0 if expired else 60.0)
        )
        self.pending.append(task)
        return task

    @rule(task=consumes(waits), settle=st.booleans())
    def cancel(self, task: asyncio.Task[Lease], settle: bool) -> None:
        task.cancel()
        if settle:
            self.settle()

    @rule(target=leases)
    def run_loop(self) -> object:
        before = set(self.held)
        self.settle()
        return multiple(*(lease for lease in self.held if lease not in before))

    @rule(lease=leases, data=st.data())
    def release_some(self, lease: Lease, data: st.DataObject) -> None:
        if lease.slots:
            chosen = data.draw(st.sets(st.sampled_from(lease.slots)))
            lease.release(chosen)
            self.held[lease] -= chosen

    @rule(lease=leases)
    def release_all(self, lease: Lease) -> None:
        lease.release()
        self.held[lease].clear()

    @rule(target=tokens, lease=leases, data=st.data())
    def begin_io(self, lease: Lease, data: st.DataObject) -> object:
        if not self.held[lease]:
            return multiple()
        chosen = frozenset(data.draw(st.sets(st.sampled_from(sorted(self.held[lease])))))
        token = lease.begin_io(chosen)
        self.io[token] = chosen
        return token

    @rule(token=tokens)
    def end_io(self, token: IoToken) -> None:
        token.end()
        self.io.pop(token, None)

    @invariant()
    def counts_match_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = set().union(*self.held.values())
        under_io = set().union(*self.io.values())
        # Grants whose task has not run yet are held too, by nobody the model knows.
        granted = self.pool.used - len(held)
        assert granted >= 0 and (granted == 0 or self.pending)
        assert self.pool.draining == len(under_io - held)

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        """The one that has waited longest is served as soon as its slots are free."""
        if not hasattr(self, "pool"):
            return
        alive = [waiter for waiter in self.pool._waiters if not waiter.granted.done()]
        if alive:
            assert alive[0].count > self.pool.free


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotMachine = SlotMachine.TestCase
