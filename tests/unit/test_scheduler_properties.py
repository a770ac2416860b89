"""Properties of the policy, checked from outside with book-keeping of the test's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.config import Role
from dualpath.scheduler import (
    POLICY_SETS,
    Assignment,
    EngineReport,
    EngineSpec,
    Request,
    Scheduler,
    SchedulerSettings,
)  # fmt: skip
from dualpath.scheduler.engine_levels import EngineLevels
from dualpath.scheduler.policies.path_split import Policy as Split
from dualpath.scheduler.state import Engine, Group, Node
from dualpath.scheduler.types import ReadPlan

pytestmark = pytest.mark.unit

BLOCK = 64
quick = settings(max_examples=50, deadline=None)
for_each_policy = settings(max_examples=20, deadline=None)


@dataclass(frozen=True)
class Case:
    """A cluster at rest with loads that reports tell, and requests that arrive at once."""

    specs: list[EngineSpec]
    reports: dict[str, EngineReport]
    requests: list[Request]
    settings: SchedulerSettings

    def start(self, names: dict[str, str] | None = None) -> Scheduler:
        """Everything registered and submitted; engine names mapped by ``names``."""
        names = names or {spec.name: spec.name for spec in self.specs}
        scheduler = Scheduler(self.settings)
        for s in self.specs:
            scheduler.add_engine(
                EngineSpec(names[s.name], s.role, s.group, s.node, s.hbm_tokens, 100.0)
            )
        for request in self.requests:
            assert scheduler.submit(request) is None
        return scheduler

    def groups(self, role: Role) -> list[str]:
        return list(dict.fromkeys(spec.group for spec in self.specs if spec.role is role))

    def of(self, group: str, names: dict[str, str] | None = None) -> list[EngineReport]:
        reports = [self.reports[s.name] for s in self.specs if s.group == group]
        if names is None:
            return reports
        return [EngineReport(names[r.engine], r.seq, r.tok, r.read_q, r.hbm_used) for r in reports]


@st.composite
def cases(draw: st.DrawFn, policy: str = "paper", hbm: int = 100) -> Case:
    specs, reports = [], {}
    for role in Role:
        for group in range(draw(st.integers(1, 2))):
            for node in range(draw(st.integers(1, 2))):
                place = f"{role.value}{group}n{node}"
                read_q = draw(st.integers(0, 20)) * BLOCK
                for local in range(draw(st.integers(1, 3))):
                    spec = EngineSpec(
                        f"{place}e{local}", role, f"{role.value}{group}", place, hbm * BLOCK
                    )
                    specs.append(spec)
                    seq = draw(st.integers(0, 4))
                    used = draw(st.integers(0, hbm)) * BLOCK
                    reports[spec.name] = EngineReport(
                        spec.name, seq, draw(st.integers(0, 3000)) if seq else 0, read_q, used
                    )
    requests = []
    for number in range(draw(st.integers(1, 25))):
        hit = draw(st.integers(0, 20)) * BLOCK
        new = draw(st.integers(0, 100))
        requests.append(Request(f"r{number}", hit + draw(st.integers(1, 200)), hit, new, BLOCK))
    alpha, beta = draw(st.integers(0, 2000)), draw(st.integers(0, 4000))
    return Case(specs, reports, requests, SchedulerSettings(alpha, beta, policy=policy))


def run(case: Case, names: dict[str, str] | None = None) -> list[Assignment]:
    """One tick: every group fetches, DE groups first."""
    scheduler = case.start(names)
    done: list[Assignment] = []
    for role in (Role.DECODE, Role.PREFILL):
        for group in case.groups(role):
            done += scheduler.fetch(group, case.of(group, names), 0.0).assigned
            scheduler.check_integrity()
    return done


def whole_fifo(case: Case) -> tuple[Scheduler, list[Assignment]]:
    """Every request has a DE with endless room before the first PE group fetches, so that this
    fetch returns exactly what it assigned, in order."""
    scheduler = case.start()
    for group in case.groups(Role.DECODE):
        scheduler.fetch(group, [], 0.0)
    for group in case.groups(Role.DECODE):  # queues of the DE nodes as reported
        scheduler.fetch(group, [
            EngineReport(r.engine, None, None, r.read_q) for r in case.of(group)
        ], 0.0)  # fmt: skip
    group = case.groups(Role.PREFILL)[0]
    return scheduler, list(scheduler.fetch(group, case.of(group), 0.0).assigned)


@quick
@given(cases(hbm=10**6))
def test_the_pe_side_is_fifo_and_never_adds_to_an_overloaded_engine(case: Case) -> None:
    _, assigned = whole_fifo(case)
    assert [a.rid for a in assigned] == [r.rid for r in case.requests[: len(assigned)]]
    group = case.groups(Role.PREFILL)[0]
    tok = {r.engine: r.tok or 0 for r in case.of(group)}
    prompts = {r.rid: r.prompt_tokens for r in case.requests}
    for a in assigned:
        assert tok[a.prefill] <= case.settings.beta_tokens
        tok[a.prefill] += prompts[a.rid]
    if len(assigned) < len(case.requests):
        assert min(tok.values()) > case.settings.beta_tokens, "the fetch ended too early"


@quick
@given(cases(hbm=10**6))
def test_the_chosen_paths_queue_is_never_longer_than_the_others(case: Case) -> None:
    _, assigned = whole_fifo(case)
    node = {spec.name: spec.node for spec in case.specs}
    queue = {node[r.engine]: r.read_q or 0 for r in case.reports.values()}
    hits = {r.rid: r.hit_tokens for r in case.requests}
    for a in assigned:
        pe_node, de_node = node[a.prefill], node[a.decode]
        if a.read.prefill_tokens:
            assert queue[pe_node] <= queue[de_node]
        if a.read.decode_tokens:
            assert queue[de_node] <= queue[pe_node]
        assert a.read.prefill_tokens + a.read.decode_tokens == hits[a.rid]
        queue[pe_node] += a.read.prefill_tokens
        queue[de_node] += a.read.decode_tokens


@quick
@given(cases(), st.data())
def test_hbm_is_never_over_committed(case: Case, data: st.DataObject) -> None:
    scheduler = case.start()
    need = {r.rid: r.hbm_tokens for r in case.requests}
    live: dict[str, Assignment] = {}
    for tick in range(4):
        for role in Role:
            for group in case.groups(role):
                reports = case.of(group) if tick == 0 else []
                before = {load.name: load.hbm_free for load in scheduler.snapshot().engines}
                if reports:
                    before |= {
                        r.engine: min(before[r.engine], 100 * BLOCK - r.hbm_used) for r in reports
                    }
                for a in scheduler.fetch(group, reports, float(tick)).assigned:
                    assert a.rid not in live
                    live[a.rid] = a
                if role is Role.DECODE:
                    # What a fetch promises was free, reported use included.
                    for load in scheduler.snapshot().engines:
                        if load.group == group:
                            assert 0 <= load.hbm_free <= before[load.name]
        promised = Counter[str]()
        for rid, a in live.items():
            promised[a.decode] += need[rid]
        assert all(tokens <= 100 * BLOCK for tokens in promised.values())
        for rid in data.draw(st.lists(st.sampled_from(sorted(live)), unique=True) if live else
                             st.just([])):  # fmt: skip
            scheduler.finish(rid)
            del live[rid]
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
def test_every_request_is_assigned_exactly_once_and_everything_comes_back(policy: str) -> None:
    @for_each_policy
    @given(cases(policy=policy))
    def check(case: Case) -> None:
        scheduler = case.start()
        idle = {r.engine: EngineReport(r.engine, 0, 0, 0, 0) for r in case.reports.values()}
        times = Counter[str]()
        for _ in range(len(case.requests) + 1):
            for role in Role:
                for group in case.groups(role):
                    reports = [idle[s.name] for s in case.specs if s.group == group]
                    for a in scheduler.fetch(group, reports, 0.0).assigned:
                        times[a.rid] += 1
                        scheduler.prefill_done(a.rid)
                        scheduler.finish(a.rid)
            scheduler.check_integrity()
        assert times == Counter(r.rid for r in case.requests)
        assert scheduler.idle

    check()


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
def test_other_names_for_the_engines_change_nothing_but_names(policy: str) -> None:
    @for_each_policy
    @given(cases(policy=policy), st.randoms(use_true_random=False))
    def check(case: Case, random) -> None:  # type: ignore[no-untyped-def]
        names = [spec.name for spec in case.specs]
        shuffled = names.copy()
        random.shuffle(shuffled)
        mapping = dict(zip(names, shuffled, strict=True))
        renamed = [
            Assignment(a.rid, mapping[a.prefill], mapping[a.decode], a.read) for a in run(case)
        ]
        assert run(case, mapping) == renamed

    check()


@quick
@given(cases(), st.data())
def test_a_report_never_loses_what_was_assigned_after_it(case: Case, data: st.DataObject) -> None:
    scheduler = case.start()
    prompts = {r.rid: r.prompt_tokens for r in case.requests}
    group = case.groups(Role.DECODE)[0]
    assigned: list[Assignment] = []
    for role in (Role.PREFILL, Role.DECODE):
        for name in case.groups(role):
            assigned += scheduler.fetch(name, case.of(name), 0.0).assigned
    mine = {s.name: [a.rid for a in assigned if a.decode == s.name] for s in case.specs}
    for spec in case.specs:
        if spec.group == group:
            missing = [rid for rid in mine[spec.name] if data.draw(st.booleans())]
            before = next(x for x in scheduler.snapshot().engines if x.name == spec.name)
            report = EngineReport(spec.name, 7, 12345, None, 0, tuple(missing))
            known = [rid for rid in mine[spec.name] if rid not in missing]
            scheduler.fetch(group, [report], 1.0)
            after = next(x for x in scheduler.snapshot().engines if x.name == spec.name)
            assert after.tok >= 12345 + sum(prompts[rid] for rid in missing)
            for rid in known:  # their end must not eat into the others
                scheduler.finish(rid)
            left = next(x for x in scheduler.snapshot().engines if x.name == spec.name)
            assert left.tok >= sum(prompts[rid] for rid in missing)
            assert before.group == left.group
    scheduler.check_integrity()


@quick
@given(
    st.integers(0, 60), st.integers(1, 3), st.integers(0, 5000), st.integers(0, 5000),
    st.sampled_from([0.0, 1.0, 50.0, 1e6]), st.sampled_from([0.0, 1.0, 70.0, 3e6]),
)  # fmt: skip
def test_a_split_read_ends_as_early_as_any_division_could(
    hit_blocks: int, block: int, queue_pe: int, queue_de: int, rate_pe: float, rate_de: float
) -> None:
    hit = hit_blocks * block
    request = Request("r", hit + 1, hit, 0, block)
    pe_node, de_node = Node("p", Group("P", Role.PREFILL, 1)), Node("d", Group("D", Role.DECODE, 2))
    pe_node.read_q, pe_node.read_tokens_per_s = queue_pe, rate_pe
    de_node.read_q, de_node.read_tokens_per_s = queue_de, rate_de
    known = rate_pe > 0 and rate_de > 0

    def end_s(plan: ReadPlan) -> float:
        sides = (
            (plan.prefill_tokens, queue_pe, rate_pe if known else 1.0),
            (plan.decode_tokens, queue_de, rate_de if known else 1.0),
        )
        return max((queue + tokens) / rate if tokens else 0.0 for tokens, queue, rate in sides)

    plan = Split(SchedulerSettings(0, 0)).plan(request, pe_node, de_node)
    assert plan.prefill_tokens % block == 0 and plan.prefill_tokens + plan.decode_tokens == hit
    every = [ReadPlan(n * block, hit - n * block) for n in range(hit_blocks + 1)]
    best = min(map(end_s, every))
    assert end_s(plan) == best
    if min(end_s(ReadPlan(hit, 0)), end_s(ReadPlan(0, hit))) == best:
        assert 0 in (plan.prefill_tokens, plan.decode_tokens), "one side alone was no slower"


@quick
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 20)), min_size=1),
    st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 60))),
)
def test_levels_find_what_looking_at_all_engines_finds(
    loads: list[tuple[int, int, int]], questions: list[tuple[bool, int, int]]
) -> None:
    group = Group("D", Role.DECODE, 0)
    engines = []
    for rank, (seq, tok, free) in enumerate(loads, start=1):
        spec = EngineSpec(f"e{rank}", Role.DECODE, "D", "n", 64)
        engine = Engine(spec, Node("n", group), group, rank)
        engine.seq, engine.tok, engine.free = seq, tok, free
        engines.append(engine)
    levels = EngineLevels(engines)
    for fewest, need, limit in questions:
        able = [e for e in engines if e.free >= need]
        if fewest:
            found = levels.fewest_requests(need, limit)
            able = [e for e in able if e.tok <= limit]
            expected = min(able, key=lambda e: (e.seq, e.tok, e.rank), default=None)
        else:
            found = levels.least_tokens(need)
            expected = min(able, key=lambda e: (e.tok, e.rank), default=None)
        assert found is expected
        if found is not None:
            found.seq, found.tok, found.free = found.seq + 1, found.tok + need, found.free - need
