"""The policy set ``work``: where the head of the FIFO goes, by counts of the test itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.config import Role
from dualpath.scheduler import (
    Assignment,
    EngineReport,
    EngineSpec,
    Request,
    Scheduler,
    SchedulerSettings,
)
from dualpath.scheduler.policies import prefill_least_work

pytestmark = pytest.mark.unit

BLOCK = 64
ROOMY = 10**9


def cluster(
    groups: list[int], *, alpha: int = 10**9, beta: int = 10**9, policy: str = "work"
) -> Scheduler:
    """PE groups of so many engines, two engines a node, and one large DE."""
    scheduler = Scheduler(SchedulerSettings(alpha, beta, policy=policy))
    for group, count in enumerate(groups):
        for index in range(count):
            place = f"p{group}n{index // 2}"
            scheduler.add_engine(
                EngineSpec(f"p{group}e{index}", Role.PREFILL, f"P{group}", place, 0, 1000.0)
            )
    scheduler.add_engine(EngineSpec("d", Role.DECODE, "D", "dn", ROOMY, 1000.0))
    return scheduler


def request(name: str, miss: int, hit: int = 0) -> Request:
    return Request(name, hit * BLOCK + miss, hit * BLOCK, 1, BLOCK)


def place(scheduler: Scheduler, requests: list[Request], group: str = "P0") -> list[Assignment]:
    """All of them have a DE before the PE group fetches."""
    for one in requests:
        assert scheduler.submit(one) is None
    scheduler.fetch("D", (), 0.0)
    done = list(scheduler.fetch(group, (), 0.0).assigned)
    scheduler.check_integrity()
    return done


def test_a_long_hit_is_little_work() -> None:
    """tok_e would avoid the engine with the long hit; the other one has ten times its work."""
    scheduler = cluster([2])
    first = place(scheduler, [request("hit", 100, hit=500), request("new", 1000)])
    homes = {one.rid: one.prefill for one in first}
    (third,) = place(scheduler, [request("third", 10)])
    assert third.prefill == homes["hit"] != homes["new"]
    paper = cluster([2], policy="paper")
    homes = {
        one.rid: one.prefill
        for one in place(paper, [request("hit", 100, hit=500), request("new", 1000)])
    }
    (third,) = place(paper, [request("third", 10)])
    assert third.prefill == homes["new"]


def test_whoever_fetches_the_idle_group_gets_its_share() -> None:
    """Eight requests, two groups of four: the paper's rule gives all to the group that fetches."""
    requests = [request(f"r{n}", 500) for n in range(8)]
    ours = Counter(one.prefill for one in place(cluster([4, 4]), requests))
    assert set(ours.values()) == {1} and len(ours) == 8
    paper = place(cluster([4, 4], policy="paper"), requests)
    assert {one.prefill[:2] for one in paper} == {"p0"}


def test_engines_of_a_busy_group_count_its_work() -> None:
    """One engine of group 0 has a long piece of work: the others step with it."""
    scheduler = cluster([2, 2])
    (long,) = place(scheduler, [request("long", 8000)])
    busy = long.prefill[:2]
    after = place(scheduler, [request(f"r{n}", 400) for n in range(4)])
    assert all(one.prefill[:2] != busy for one in after)


def test_a_long_read_queue_comes_second() -> None:
    scheduler = cluster([4], alpha=1000)
    reports = [EngineReport(f"p0e{n}", None, None, 5000 if n < 2 else 0) for n in range(4)]
    scheduler.fetch("P0", reports, 0.0)
    done = place(scheduler, [request(f"r{n}", 500) for n in range(4)])
    assert {one.prefill for one in done} == {"p0e2", "p0e3"}


def test_work_leaves_an_engine_with_its_prefill() -> None:
    scheduler = cluster([2])
    (first,) = place(scheduler, [request("a", 5000)])
    scheduler.prefill_done("a")
    (second,) = place(scheduler, [request("b", 10)])
    assert second.prefill == first.prefill  # both idle again: the first one registered
    scheduler.drain(first.prefill)
    (third,) = place(scheduler, [request("c", 10)])
    assert third.prefill != first.prefill
    for rid in ("a", "b", "c"):
        scheduler.finish(rid)
    scheduler.check_integrity()
    assert scheduler.idle


loads = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 60)), min_size=1, max_size=40
)  # miss tokens, hit blocks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3), loads, st.integers(0, 30_000), st.data()
)
def test_fifo_beta_and_the_least_work(
    groups: list[int], work: list[tuple[int, int]], beta: int, data: st.DataObject
) -> None:
    """The head goes to a PE with the least work of all that are not overloaded, in order; the
    fetch ends only when all are, so nobody starves while there is a PE that may take work."""
    scheduler = cluster(groups, beta=beta)
    names = [f"p{group}e{index}" for group, count in enumerate(groups) for index in range(count)]
    miss, tok = Counter[str](), Counter[str]()
    requests = {f"r{n}": request(f"r{n}", *one) for n, one in enumerate(work)}

    def key(name: str) -> int:
        group = name[:2]
        members = [one for one in names if one[:2] == group]
        return miss[name] + sum(miss[one] for one in members) // len(members)

    left = list(requests)
    cut = data.draw(st.integers(0, len(left)))
    for part in (left[:cut], left[cut:]):
        group = f"P{data.draw(st.integers(0, len(groups) - 1))}"
        waiting = left[: left.index(part[-1]) + 1] if part else []
        done = place(scheduler, [requests[rid] for rid in part], group)
        assert [one.rid for one in done] == waiting[: len(done)]
        for one in done:
            usable = [name for name in names if tok[name] <= beta]
            assert one.prefill in usable
            assert key(one.prefill) == min(map(key, usable))
            miss[one.prefill] += work[int(one.rid[1:])][0]
            tok[one.prefill] += requests[one.rid].prompt_tokens
            left.remove(one.rid)
        if len(done) < len(waiting):
            assert min(tok[name] for name in names) > beta


@pytest.mark.parametrize("seed", range(4))
def test_looking_at_all_and_sorting_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Assignment]:
        rng = random.Random(seed)
        scheduler = cluster([3, 5, 1], alpha=20_000, beta=60_000)
        done: list[Assignment] = []
        running: list[str] = []
        serial = 0
        for tick in range(25):
            fresh = []
            for _ in range(rng.randrange(0, 30)):
                serial += 1
                fresh.append(request(f"r{serial}", rng.randrange(1, 6000), rng.randrange(0, 99)))
            assigned = place(scheduler, fresh, f"P{tick % 3}")
            done += assigned
            running += [one.rid for one in assigned]
            rng.shuffle(running)
            for _ in range(len(running) // 2):
                scheduler.prefill_done(running.pop())
        return done

    plain = run()
    monkeypatch.setattr(prefill_least_work, "_SCANS", 0)
    assert run() == plain
    monkeypatch.setattr(prefill_least_work, "_SCANS", 10**6)
    assert run() == plain
