"""Scenarios worked out by hand: one per category, tie and edge of docs/scheduler.md.

Unless a test says otherwise alpha = 1000, beta = 5000, Z factor 1.05, blocks of 64 tokens.
"""

from __future__ import annotations

import pytest

from dualpath.config import Mode, Role, SchedulerConfig
from dualpath.scheduler import (
    Assignment,
    EngineReport,
    EngineSpec,
    ReadPath,
    ReadPlan,
    RejectReason,
    Request,
    Scheduler,
    SchedulerError,
    SchedulerSettings,
)  # fmt: skip
from dualpath.scheduler.attention_time import AttentionTimeModel
from dualpath.scheduler.profile import Profile

pytestmark = pytest.mark.unit


def scheduler(policy: str = "paper", alpha: int = 1000, beta: int = 5000) -> Scheduler:
    return Scheduler(SchedulerSettings(alpha, beta, policy=policy))


def pe(name: str, group: str = "P", node: str = "") -> EngineSpec:
    return EngineSpec(name, Role.PREFILL, group, node or f"n-{name}")


def de(name: str, hbm: int = 64_000, group: str = "D", node: str = "") -> EngineSpec:
    return EngineSpec(name, Role.DECODE, group, node or f"n-{name}", hbm)


def report(name: str, seq: int = 0, tok: int = 0, read_q: int = 0, used: int = 0) -> EngineReport:
    return EngineReport(name, seq, tok, read_q, used)


def request(rid: str, prompt: int = 1000, hit: int = 640, new: int = 0) -> Request:
    return Request(rid, prompt, hit, new, 64)


def prefills(s: Scheduler, reports: list[EngineReport], *prompts: int) -> list[str]:
    """The PEs that requests of these lengths get from one fetch; their DE is known before."""
    s.add_engine(de("d", 10**9))
    for number, prompt in enumerate(prompts):
        assert s.submit(request(f"r{number}", prompt, 0)) is None
    s.fetch("D", [], 0.0)
    assigned = s.fetch("P", reports, 0.0).assigned
    s.check_integrity()
    assert [a.rid for a in assigned] == [f"r{n}" for n in range(len(assigned))]
    return [a.prefill for a in assigned]


# ---- PE ----------------------------------------------------------------------------------------


def test_short_queue_goes_before_long_queue_although_it_has_more_tokens() -> None:
    # a: read_q 1001 > alpha: long, tok 0.  b: read_q 1000 <= alpha: short, tok 4000.
    s = scheduler()
    s.add_engine(pe("a"))
    s.add_engine(pe("b"))
    reports = [report("a", read_q=1001), report("b", 4, 4000, 1000)]
    # r0 -> b (4100), r1 -> b (5100 > beta: overloaded from now on), r2 -> a, the only one left.
    assert prefills(s, reports, 100, 1000, 1000) == ["b", "b", "a"]


def test_overloaded_gets_nothing_and_beta_itself_is_not_overloaded() -> None:
    s = scheduler()
    s.add_engine(pe("a"))
    s.add_engine(pe("b"))
    # a is at 5001 > beta; b at 5000 = beta takes one more and is then overloaded too.
    assert prefills(s, [report("a", 5, 5001), report("b", 5, 5000)], 10, 10) == ["b"]
    assert s.snapshot().waiting_prefill == 1


def test_long_queue_is_served_by_least_tokens_when_no_queue_is_short() -> None:
    s = scheduler()
    s.add_engine(pe("a"))
    s.add_engine(pe("b"))
    reports = [report("a", 1, 300, 2000), report("b", 1, 200, 9000)]
    # b 200 -> 350; a 300 -> 450; b 350.
    assert prefills(s, reports, 150, 150, 150) == ["b", "a", "b"]


def test_equal_tokens_go_to_the_engine_registered_first() -> None:
    s = scheduler()
    for name in ("z", "a", "m"):
        s.add_engine(pe(name))
    assert prefills(s, [], 100, 100, 100, 100) == ["z", "a", "m", "z"]


def test_a_queue_that_grows_during_the_fetch_changes_the_category() -> None:
    # a and b share a node, c has its own. All DEs' queues are long, so every read goes to the PE.
    # r0 (hit 1024) -> a: the node's queue is 1024 > alpha = 1000, so a AND b are long at once and
    # c, short, gets r1 although it has more tokens (2000) than b (0) has. Its queue is now 1024
    # as well, so all are long and r2 goes to the least tokens: b (0).
    s = scheduler()
    s.add_engine(pe("a", node="ab"))
    s.add_engine(pe("b", node="ab"))
    s.add_engine(pe("c"))
    s.add_engine(de("d", 10**6))
    for number in range(3):
        s.submit(request(f"r{number}", 1100, 1024))
    s.fetch("D", [report("d", read_q=10**6)], 0.0)
    assigned = s.fetch("P", [report("c", 1, 2000)], 0.0).assigned
    assert [a.prefill for a in assigned] == ["a", "c", "b"]
    assert all(a.read == ReadPlan(1024, 0) for a in assigned)


def test_a_fetch_considers_the_fetching_group_only() -> None:
    s = scheduler()
    s.add_engine(pe("a", group="P"))
    s.add_engine(pe("idle", group="Q"))
    # a goes from 4999 to 5009 > beta; r1 waits although another group has an idle PE.
    assert prefills(s, [report("a", 4, 4999)], 10, 10) == ["a"]
    assert [load.seq for load in s.snapshot().engines if load.name == "idle"] == [0]


# ---- DE ----------------------------------------------------------------------------------------


def decodes(s: Scheduler, group: str, reports: list[EngineReport]) -> list[tuple[str, str]]:
    """``(rid, DE)`` of what one fetch of ``group`` completes; their PE is known before."""
    decisions = s.fetch(group, reports, 0.0)
    s.check_integrity()
    return [(a.rid, a.decode) for a in decisions.assigned]


def queue_up(s: Scheduler, *requests: Request) -> None:
    s.add_engine(pe("p"))
    for item in requests:
        assert s.submit(item) is None
    s.fetch("P", [], 0.0)


def test_phase_1_evens_out_the_groups_totals_with_private_queues_counted() -> None:
    # D0 starts at 500, D1 at 0. Prompts 300, 300, 100, 100:
    # r0 -> D1 (300), r1 -> D1 (600), r2 -> D0 (600), r3 -> D0, registered first of two at 600.
    s = scheduler(beta=10**6)
    s.add_engine(de("a", group="D0"))
    s.add_engine(de("b", group="D1"))
    assert decodes(s, "D0", [report("a", 1, 500)]) == []
    queue_up(s, *(request(f"r{n}", prompt, 0) for n, prompt in enumerate((300, 300, 100, 100))))
    assert decodes(s, "D0", []) == [("r2", "a"), ("r3", "a")]
    assert decodes(s, "D1", []) == [("r0", "b"), ("r1", "b")]


def test_phase_2_prefers_fewest_requests_below_z_then_least_tokens() -> None:
    # a: seq 1, tok 4000; b: seq 9, tok 1000; c: seq 5, tok 2000. R = {1000}.
    # Z = 1.05 * (1000 + 7000) / 3 = 2800: a (5000) is not low, b (2000) and c (3000)...
    # b alone is low, so b, although a and c have fewer requests.
    s = scheduler()
    for name in ("a", "b", "c"):
        s.add_engine(de(name))
    queue_up(s, request("r0", 1000, 0))
    reports = [report("a", 1, 4000), report("b", 9, 1000), report("c", 5, 2000)]
    assert decodes(s, "D", reports) == [("r0", "b")]
    # With c at 1500 Z = 1.05 * (r1 1000 + a 4000 + b 1000 + c 1500) / 3 = 2625: b (2000) and
    # c (2500) are low and c has fewer requests.
    s.submit(request("r1", 1000, 0))
    s.fetch("P", [], 0.0)
    reports = [report("a", 1, 4000), report("b", 9, 1000), report("c", 5, 1500)]
    assert decodes(s, "D", reports) == [("r1", "c")]


def test_z_is_inclusive() -> None:
    # Z factor 1. x: seq 1, tok 500; y: seq 5, tok 100; w: seq 0, tok 1900; r0 = 500.
    # Z = (500 + 2500) / 3 = 1000: x would have exactly 1000, so it is low, and has fewer requests
    # than y. With w at 1897 Z = 999: only y is low.
    for tok_w, expected in ((1900, "x"), (1897, "y")):
        s = Scheduler(SchedulerSettings(1000, 5000, z_factor=1.0))
        for name in ("x", "y", "w"):
            s.add_engine(de(name))
        queue_up(s, request("r0", 500, 0))
        reports = [report("x", 1, 500), report("y", 5, 100), report("w", 0, tok_w)]
        assert decodes(s, "D", reports) == [("r0", expected)]


def test_nobody_low_takes_the_least_tokens_with_room() -> None:
    # Both 0 tokens, one request of 1000: Z = 1.05 * 1000 / 2 = 525: nobody is low. a has no room
    # (64 used of 1000 rounded to 1024), so b.
    s = scheduler()
    s.add_engine(de("a", 1024))
    s.add_engine(de("b", 1024))
    queue_up(s, request("r0", 1000, 0))
    assert decodes(s, "D", [report("a", used=64)]) == [("r0", "b")]


def test_r_ends_where_the_groups_room_ends() -> None:
    # Room 2048 together; needs 1024 each: R = {r0, r1}, r2 and r3 do not count towards Z.
    # Z = 1.05 * 2000 / 2 = 1050: both are low for 1000. r0 -> a, r1 -> b, then nothing fits.
    s = scheduler()
    s.add_engine(de("a", 1024))
    s.add_engine(de("b", 1024))
    queue_up(s, *(request(f"r{n}", 1000, 0) for n in range(4)))
    assert decodes(s, "D", []) == [("r0", "a"), ("r1", "b")]
    s.finish("r1")
    assert decodes(s, "D", []) == [("r2", "b")]


def test_a_head_that_fits_no_single_engine_waits_and_nobody_overtakes_it() -> None:
    # 512 free on each, 1024 together: the head (need 1024) is in R but fits nowhere; the fetch
    # ends although r1 (need 64) would fit. Once an engine is free it goes, and r1 after it.
    s = scheduler()
    s.add_engine(de("a", 1024))
    s.add_engine(de("b", 1024))
    queue_up(s, request("r0", 1000, 0), request("r1", 64, 0))
    used = [report("a", used=512), report("b", used=512)]
    assert decodes(s, "D", used) == []
    assert decodes(s, "D", [report("b")]) == [("r0", "b"), ("r1", "a")]


def test_hbm_promise_covers_prompt_and_answer_in_whole_blocks() -> None:
    # 1000 + 20 -> 1024 of 1024: fits. One token more needs 1088.
    s = scheduler()
    s.add_engine(de("a", 1024))
    assert request("x", 1000, 0, 24).hbm_tokens == 1024
    rejection = s.submit(request("big", 1000, 0, 25))
    assert rejection is not None and rejection.reason is RejectReason.LARGER_THAN_HBM
    assert "1088" in rejection.detail and "1024" in rejection.detail
    queue_up(s, request("r0", 1000, 0, 24))
    assert decodes(s, "D", []) == [("r0", "a")]


# ---- read path -----------------------------------------------------------------------------------


def test_mass_arrival_within_one_tick_is_read_through_both_sides() -> None:
    # One PE, one DE, all queues empty, 6 requests with 640 hit tokens: the scheduler's own
    # increments make the sides alternate: tie -> PE, then the shorter one.
    s = scheduler(alpha=10**6, beta=10**6)
    s.add_engine(pe("p"))
    s.add_engine(de("d"))
    for number in range(6):
        s.submit(request(f"r{number}"))
    assert s.fetch("P", [], 0.0).assigned == ()
    assigned = s.fetch("D", [], 0.0).assigned
    assert [a.read.path for a in assigned] == [ReadPath.PREFILL, ReadPath.DECODE] * 3
    assert {load.read_q for load in s.snapshot().engines} == {3 * 640}


def test_shorter_queue_reads_and_a_tie_is_the_pe_side() -> None:
    for pe_q, de_q, plan in (
        (0, 0, (640, 0)),
        (1, 0, (0, 640)),
        (0, 1, (640, 0)),
        (9, 9, (640, 0)),
    ):
        s = scheduler()
        s.add_engine(pe("p"))
        s.add_engine(de("d"))
        s.submit(request("r"))
        s.fetch("P", [report("p", read_q=pe_q)], 0.0)
        decisions = s.fetch("D", [report("d", read_q=de_q)], 0.0)
        assert decisions.assigned == (Assignment("r", "p", "d", ReadPlan(*plan)),)
        assert s.fetch("D", [], 0.0).assigned == () and s.fetch("P", [], 0.0).assigned == ()


def test_without_hits_nothing_is_read_on_the_pe_path_under_every_policy() -> None:
    for policy in ("paper", "split", "pe_only", "alternating", "basic", "round_robin"):
        s = scheduler(policy)
        s.add_engine(pe("p"))
        s.add_engine(de("d"))
        s.submit(request("r", 100, 0))
        s.fetch("P", [report("p", read_q=10**9)], 0.0)
        (assignment,) = s.fetch("D", [], 0.0).assigned
        assert assignment.read == ReadPlan(0, 0) and assignment.read.path is ReadPath.PREFILL


def test_no_path_is_chosen_while_a_side_is_missing() -> None:
    s = scheduler()
    s.add_engine(pe("p"))
    s.submit(request("r"))
    for _ in range(3):
        assert s.fetch("P", [], 0.0).assigned == ()  # no DE at all
    assert {load.read_q for load in s.snapshot().engines} == {0}
    s.add_engine(de("d"))
    assert [a.rid for a in s.fetch("D", [], 0.0).assigned] == ["r"]

    s = scheduler()
    s.add_engine(de("d"))
    s.submit(request("r"))
    assert s.fetch("D", [], 0.0).assigned == ()  # no PE at all
    assert s.fetch("P", [], 0.0).assigned == ()  # a group that nobody has joined
    s.add_engine(pe("p"))
    assert [a.rid for a in s.fetch("P", [], 0.0).assigned] == ["r"]


def test_pe_only_never_reads_on_the_de() -> None:
    s = scheduler("pe_only", alpha=10**6, beta=10**6)
    s.add_engine(pe("p"))
    s.add_engine(de("d"))
    for number in range(4):
        s.submit(request(f"r{number}"))
    s.fetch("P", [report("p", read_q=10**5)], 0.0)
    assert [a.read for a in s.fetch("D", [], 0.0).assigned] == [ReadPlan(640, 0)] * 4


def test_round_robin_takes_engines_and_paths_in_turn_and_skips_no_hit_requests() -> None:
    s = scheduler("round_robin")
    for name in ("p0", "p1"):
        s.add_engine(pe(name, group=name))
    for name in ("d0", "d1", "d2"):
        s.add_engine(de(name))
    hits = (640, 640, 0, 640, 640)
    for number, hit in enumerate(hits):
        s.submit(request(f"r{number}", 1000, hit))
    s.fetch("D", [], 0.0)
    # One fetch of one PE group places them over both groups.
    assigned = s.fetch("p0", [report("p0", 9, 10**6, 10**6)], 0.0).assigned
    assert [a.prefill for a in assigned] == ["p0", "p1", "p0", "p1", "p0"]
    assert [a.decode for a in assigned] == ["d0", "d1", "d2", "d0", "d1"]
    assert [a.read.path.value for a in assigned] == ["pe", "de", "pe", "pe", "de"]


def test_alternating_keeps_the_papers_engines() -> None:
    s = scheduler("alternating", beta=10**6)
    for name in ("p0", "p1"):
        s.add_engine(pe(name))
    s.add_engine(de("d"))
    for number, prompt in enumerate((3000, 1000, 1000)):
        s.submit(request(f"r{number}", prompt))
    s.fetch("D", [], 0.0)
    assigned = s.fetch("P", [], 0.0).assigned
    assert [a.prefill for a in assigned] == ["p0", "p1", "p1"]
    assert [a.read.path.value for a in assigned] == ["pe", "de", "pe"]


# ---- edges ---------------------------------------------------------------------------------------


def test_a_request_larger_than_any_hbm_is_refused_at_once_and_blocks_nobody() -> None:
    s = scheduler()
    s.add_engine(de("d", 1024))
    queue_up(s)
    rejection = s.submit(request("big", 5000, 640))
    assert rejection is not None and rejection.rid == "big"
    s.submit(request("r", 1000))
    s.fetch("P", [], 0.0)
    assert decodes(s, "D", []) == [("r", "d")]
    assert s.snapshot().rejected == 1


def test_a_request_that_became_too_large_is_refused_by_the_next_fetch() -> None:
    # It was fine for "large"; when that engine goes, no DE can ever hold it.
    s = scheduler()
    s.add_engine(de("large", 6400, group="D0"))
    s.add_engine(de("small", 1024, group="D1"))
    queue_up(s, request("r0", 5000), request("r1", 500, 64))
    assert s.remove_engine("large") == []
    decisions = s.fetch("D1", [], 0.0)
    assert [r.rid for r in decisions.rejected] == ["r0"]
    assert [a.rid for a in decisions.assigned] == ["r1"]
    assert s.fetch("D1", [], 0.0).rejected == ()
    s.finish("r1")
    s.check_integrity()
    assert s.idle


def test_a_large_request_waits_apart_while_its_only_engine_is_drained() -> None:
    s = scheduler()
    s.add_engine(de("large", 6400))
    s.add_engine(de("small", 1024))
    queue_up(s, request("r0", 5000), request("r1", 500, 64))
    s.drain("large")
    assert decodes(s, "D", []) == [("r1", "small")]
    assert s.snapshot().parked == 1
    s.undrain("large")
    assert decodes(s, "D", []) == [("r0", "large")]


def test_without_any_de_requests_wait_rather_than_fail() -> None:
    s = scheduler()
    queue_up(s, request("r0", 5000))
    s.add_engine(de("d", 6400))
    assert s.remove_engine("d") == []
    assert s.fetch("P", [], 0.0).rejected == ()
    s.add_engine(de("e", 6400))
    assert decodes(s, "D", []) == [("r0", "e")]


def test_removing_an_engine_drops_what_was_returned_and_queues_the_rest_again_in_order() -> None:
    s = scheduler(beta=10**6)
    s.add_engine(pe("a"))
    s.add_engine(de("d", 1024))
    for number in range(4):
        s.submit(request(f"r{number}", 1000))
    s.fetch("P", [], 0.0)
    assert decodes(s, "D", []) == [("r0", "d")]  # r1..r3 have a PE only
    assert s.remove_engine("a") == ["r0"]
    s.check_integrity()
    assert s.snapshot().waiting_prefill == 3
    assert s.submit(request("r0")) is None  # the caller may bring it again
    s.add_engine(pe("b"))
    s.fetch("P", [], 0.0)
    for expected in ("r1", "r2", "r3", "r0"):
        assert decodes(s, "D", []) == [(expected, "d")]
        s.finish(expected)
    assert s.idle


def test_a_pe_that_is_done_with_a_request_does_not_take_it_along() -> None:
    s = scheduler()
    s.add_engine(de("d"))
    queue_up(s, request("r0"))
    decodes(s, "D", [])
    s.prefill_done("r0")
    s.prefill_done("r0")
    assert [load.tok for load in s.snapshot().engines] == [1000, 0]
    assert s.remove_engine("p") == []
    assert s.remove_engine("d") == ["r0"]
    assert s.idle


@pytest.mark.parametrize("stage", ["queued", "pe", "de", "both", "read", "prefilled"])
def test_cancellation_at_each_stage_returns_every_token(stage: str) -> None:
    s = scheduler()
    s.add_engine(pe("p"))
    s.add_engine(de("d"))
    s.submit(request("r", new=100))
    if stage in ("pe", "both", "read", "prefilled"):
        s.fetch("P", [], 0.0)
    if stage in ("de", "both", "read", "prefilled"):
        s.fetch("D", [], 0.0)
    if stage in ("read", "prefilled"):
        s.read_done("r", Role.PREFILL, 320)
        assert {load.name: load.read_q for load in s.snapshot().engines} == {"p": 320, "d": 0}
    if stage == "prefilled":
        s.prefill_done("r")
    assert not s.idle
    s.cancel("r")
    s.cancel("r")
    s.check_integrity()
    assert s.idle
    figures = {(load.tok, load.seq, load.read_q) for load in s.snapshot().engines}
    assert figures == {(0, 0, 0)}
    assert [load.hbm_free for load in s.snapshot().engines] == [0, 64_000]
    assert s.fetch("P", [], 0.0).assigned == s.fetch("D", [], 0.0).assigned == ()


def test_a_report_older_than_an_assignment_does_not_lose_it() -> None:
    # The PE says it knows of nothing: r0 was still on its way. tok stays 1000 and 640 stay queued.
    s = scheduler()
    s.add_engine(pe("p"))
    s.add_engine(de("d"))
    s.submit(request("r0"))
    s.fetch("P", [], 0.0)
    s.fetch("D", [], 0.0)
    s.fetch("P", [EngineReport("p", 0, 0, 0, 0, missing=("r0", "unknown"))], 0.1)
    assert (s.snapshot().engines[0].tok, s.snapshot().engines[0].read_q) == (1000, 640)
    s.fetch("P", [report("p", 1, 1000, 300)], 0.2)  # now it does: its word replaces ours
    assert (s.snapshot().engines[0].tok, s.snapshot().engines[0].read_q) == (1000, 300)
    s.fetch("P", [report("p", 0, 0, 0)], 0.3)
    s.submit(request("r1"))
    s.fetch("P", [], 0.3)
    s.fetch("D", [report("d", read_q=10**6)], 0.3)
    s.finish("r0")  # known to be over: r1's tokens must stay
    load = s.snapshot().engines[0]
    assert (load.tok, load.seq, load.read_q) == (1000, 1, 640)
    s.check_integrity()


def test_a_request_without_its_other_side_is_in_no_report_and_stays_counted() -> None:
    s = scheduler()
    s.add_engine(pe("p"))
    s.submit(request("r0"))
    s.fetch("P", [], 0.0)
    s.fetch("P", [report("p", 0, 0, 0)], 0.1)
    assert s.snapshot().engines[0].tok == 1000


def test_of_several_reports_of_a_node_the_longest_queue_stands() -> None:
    s = scheduler()
    s.add_engine(pe("a", node="n"))
    s.add_engine(pe("b", node="n"))
    s.fetch("P", [report("a", read_q=700), report("b", read_q=300)], 0.0)
    assert [load.read_q for load in s.snapshot().engines] == [700, 700]


def test_misuse_is_refused_without_effect() -> None:
    s = scheduler()
    s.add_engine(pe("p"))
    s.add_engine(de("d"))
    with pytest.raises(SchedulerError, match="registered already"):
        s.add_engine(pe("p"))
    with pytest.raises(SchedulerError, match="role"):
        s.add_engine(de("x", group="P"))
    with pytest.raises(SchedulerError, match="node 'n-p' is in group 'P'"):
        s.add_engine(pe("y", group="Q", node="n-p"))
    with pytest.raises(SchedulerError, match="no engine"):
        s.drain("nobody")
    with pytest.raises(SchedulerError, match="not in the fetching group"):
        s.fetch("P", [report("d")], 0.0)
    s.submit(request("r"))
    with pytest.raises(SchedulerError, match="already"):
        s.submit(request("r"))
    with pytest.raises(ValueError, match="whole blocks"):
        request("q", 1000, 100)
    with pytest.raises(ValueError, match="together"):
        EngineReport("p", None, 1, 0)
    with pytest.raises(ValueError, match="policy must be one of paper"):
        SchedulerSettings(1, 1, policy="nonsense")
    with pytest.raises(ValueError, match="no path policy is called 'x'; there are: alternating"):
        scheduler("least_tokens/balanced/x")
    s.fetch("P", [report("gone")], 0.0)
    assert s.snapshot().stale_reports == 1
    assert len(s.snapshot().engines) == 2
    s.check_integrity()


def test_silent_engines_are_found_by_the_clock_of_the_fetches() -> None:
    s = scheduler()
    s.add_engine(pe("a"))
    s.add_engine(pe("b"))
    s.fetch("P", [report("a"), report("b")], 10.0)
    s.fetch("P", [report("b")], 12.0)
    assert s.silent(13.0, 2.5) == ["a"]
    s.drain("a")
    assert s.silent(13.0, 2.5) == []


def test_a_mode_has_its_own_policy_unless_one_is_configured() -> None:
    named = {mode: SchedulerSettings.of(SchedulerConfig(), mode).policy for mode in Mode}
    assert named == {
        Mode.BASIC: "basic",
        Mode.PE_ONLY: "pe_only",
        Mode.DUALPATH: "paper",
        Mode.SPLIT: "split",
        Mode.ORACLE: "paper",
    }
    assert SchedulerSettings.of(SchedulerConfig(policy="split"), Mode.DUALPATH).policy == "split"


def test_measured_thresholds_go_before_those_of_the_file() -> None:
    described = SchedulerConfig(alpha_tokens=7, beta_tokens=9, z_factor=1.5)
    cost = AttentionTimeModel(0.0, 1e-4, 0.0, 0.0, 0.0)
    profile = Profile("tiny", "a desk", 100, {"n": 1e6}, 500.0, 0.5, cost)
    plain = SchedulerSettings.of(described, Mode.DUALPATH)
    measured = SchedulerSettings.of(described, Mode.DUALPATH, profile)
    assert (plain.alpha_tokens, plain.beta_tokens) == (7, 9)
    assert (measured.alpha_tokens, measured.beta_tokens) == (30_000, 5_000)
    assert measured.z_factor == 1.5
