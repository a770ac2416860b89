"""The scheduler against the plain reference, and its ledger, under arbitrary sequences of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_reference import Reference, RefRequest

from dualpath.config import Role
from dualpath.scheduler import (
    EngineReport,
    EngineSpec,
    RejectReason,
    Request,
    Scheduler,
    SchedulerSettings,
)  # fmt: skip

pytestmark = pytest.mark.unit

ALPHA, BETA = 400, 1000
GROUPS = {
    "P0": (Role.PREFILL, ("pn0", "pn1")),
    "P1": (Role.PREFILL, ("pn2",)),
    "D0": (Role.DECODE, ("dn0", "dn1")),
    "D1": (Role.DECODE, ("dn2",)),
}
blocks = st.integers(0, 20)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule makes the same call on both and compares what comes back.

    Reports are honest: an engine says exactly what reached it, and ``missing`` names the rest. They
    must then change nothing at all.
    """

    def __init__(self) -> None:
        super().__init__()
        settings = SchedulerSettings(ALPHA, BETA)
        self.real = Scheduler(settings)
        self.ref = Reference(settings)
        self.serial = 0
        self.now_s = 0.0
        self.doomed: list[str] = []

    def pick(self, data: st.DataObject, names: list[str]) -> str:
        return data.draw(st.sampled_from(names))

    @rule(group=st.sampled_from(sorted(GROUPS)), node=st.integers(0, 1), hbm=st.integers(2, 30))
    @precondition(lambda self: len(self.ref.engines) < 10)
    def add(self, group: str, node: int, hbm: int) -> None:
        role, nodes = GROUPS[group]
        self.serial += 1
        hbm_tokens = hbm * 64 if role is Role.DECODE else 0
        spec = EngineSpec(f"e{self.serial}", role, group, nodes[node % len(nodes)], hbm_tokens)
        self.real.add_engine(spec)
        self.ref.add(spec)

    @rule(data=st.data())
    @precondition(lambda self: self.ref.engines)
    def remove(self, data: st.DataObject) -> None:
        name = self.pick(data, list(self.ref.engines))
        dropped, too_large = self.ref.remove(name)
        assert self.real.remove_engine(name) == dropped
        self.doomed += too_large

    @rule(data=st.data())
    @precondition(lambda self: self.ref.engines)
    def drain(self, data: st.DataObject) -> None:
        name = self.pick(data, list(self.ref.engines))
        self.real.drain(name)
        self.ref.take_out(name)

    @rule(data=st.data())
    @precondition(lambda self: self.ref.engines)
    def undrain(self, data: st.DataObject) -> None:
        name = self.pick(data, list(self.ref.engines))
        self.real.undrain(name)
        self.ref.active.add(name)

    @rule(hit=blocks, miss=st.integers(1, 200), new=st.integers(0, 200), count=st.integers(1, 5))
    def submit(self, hit: int, miss: int, new: int, count: int) -> None:
        for _ in range(count):
            self.serial += 1
            request = Request(f"r{self.serial}", hit * 64 + miss, hit * 64, new, 64)
            largest = max((e.hbm_tokens for e in self.ref.engines.values()), default=0)
            rejection = self.real.submit(request)
            if largest and request.hbm_tokens > largest:
                assert rejection is not None
                assert rejection.reason is RejectReason.LARGER_THAN_HBM
            else:
                assert rejection is None
                self.ref.requests[request.rid] = RefRequest(request)

    @rule(data=st.data(), group=st.sampled_from(sorted(GROUPS)))
    def fetch(self, data: st.DataObject, group: str) -> None:
        reports = []
        for name, spec in self.ref.engines.items():
            if spec.group != group or not data.draw(st.booleans()):
                continue
            if spec.role is Role.DECODE:
                self.ref.used[name] = data.draw(st.integers(0, spec.hbm_tokens))
            here = [r for r in self.ref.of(name) if r.complete]
            missing = [r for r in here if data.draw(st.booleans())]
            known = [r for r in here if r not in missing]
            counts = data.draw(st.booleans())
            reports.append(
                EngineReport(
                    name,
                    len(known) if counts else None,
                    sum(r.request.prompt_tokens for r in known) if counts else None,
                    None,
                    self.ref.used[name],
                    tuple(r.request.rid for r in missing),
                )
            )
        self.now_s += 1.0
        decisions = self.real.fetch(group, reports, self.now_s)
        assert list(decisions.assigned) == self.ref.fetch(group)
        assert {rejection.rid for rejection in decisions.rejected} == set(self.doomed)
        self.doomed = []

    @rule(data=st.data(), late=st.booleans())
    @precondition(lambda self: self.ref.requests)
    def report_reads(self, data: st.DataObject, late: bool) -> None:
        """A whole node reports its read queue; all its reads are known, or none is (late)."""
        nodes = sorted({spec.node for spec in self.ref.engines.values()})
        if not nodes:
            return
        node = self.pick(data, nodes)
        spec = next(s for s in self.ref.engines.values() if s.node == node)
        rids = tuple(rid for rid, r in self.ref.requests.items() if r.complete) if late else ()
        read_q = 0 if late else self.ref.read_q(node)
        decisions = self.real.fetch(
            spec.group,
            [EngineReport(spec.name, None, None, read_q, self.ref.used[spec.name], rids)],
            self.now_s,
        )
        assert list(decisions.assigned) == self.ref.fetch(spec.group)
        assert {rejection.rid for rejection in decisions.rejected} == set(self.doomed)
        self.doomed = []

    @rule(data=st.data(), side=st.sampled_from(Role), part=st.none() | st.integers(0, 700))
    @precondition(lambda self: self.ref.requests)
    def read_done(self, data: st.DataObject, side: Role, part: int | None) -> None:
        rid = self.pick(data, list(self.ref.requests))
        self.real.read_done(rid, side, part)
        r = self.ref.requests[rid]
        if side is Role.PREFILL:
            r.pe_read = max(0, r.pe_read - part) if part is not None else 0
        else:
            r.de_read = max(0, r.de_read - part) if part is not None else 0

    @rule(data=st.data())
    @precondition(lambda self: self.ref.requests)
    def prefill_done(self, data: st.DataObject) -> None:
        rid = self.pick(data, list(self.ref.requests))
        r = self.ref.requests[rid]
        self.real.read_done(rid, Role.PREFILL)
        self.real.prefill_done(rid)
        if r.complete:
            r.prefilled = True
            r.pe_read = 0

    @rule(data=st.data(), whole=st.booleans())
    @precondition(lambda self: self.ref.requests)
    def end(self, data: st.DataObject, whole: bool) -> None:
        rid = self.pick(data, list(self.ref.requests))
        if whole:
            self.real.read_done(rid, Role.PREFILL)
            self.real.read_done(rid, Role.DECODE)
            self.real.finish(rid)
            self.real.finish(rid)
        else:
            self.real.cancel(rid)
            self.real.cancel(rid)
        del self.ref.requests[rid]

    @invariant()
    def same_figures(self) -> None:
        self.real.check_integrity()
        shot = self.real.snapshot()
        requests = self.ref.requests.values()
        assert shot.assigned == sum(r.complete for r in requests)
        assert shot.waiting_prefill == sum(r.pe is None for r in requests)
        assert shot.waiting_decode == sum(r.de is None for r in requests)
        for load in shot.engines:
            assert load.tok == self.ref.tok(load.name)
            assert load.seq == self.ref.seq(load.name)
            assert load.read_q == self.ref.read_q(load.node)
            if load.role is Role.DECODE:
                assert load.hbm_free == self.ref.free(load.name)
            assert load.active == (load.name in self.ref.active)

    def teardown(self) -> None:
        for rid in list(self.ref.requests):
            self.real.cancel(rid)
        self.real.check_integrity()
        assert self.real.idle


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
