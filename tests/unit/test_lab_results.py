"""The lab's pure parts: traces, the arithmetic on samples, what runs say, files, the page."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from dualpath.config import Mode
from dualpath.lab.experiments import ALL_MODES, EXPERIMENTS, Case, Shape
from dualpath.lab.isolation import _Round, judge
from dualpath.lab.summing import capacities, readers, summarise
from dualpath.report.lab.bounds import (
    Balance,
    NodeSample,
    Sample,
    balance,
    busy,
    max_over_mean,
    pooled_bound,
    rates,
)
from dualpath.report.lab.results import (
    CaseSummary,
    Check,
    NodeBytes,
    RunResult,
)
from dualpath.workload import token_agents, trace_stats

pytestmark = pytest.mark.unit

BLOCK = 64
SHAPE = Shape(agents=3, context_tokens=1000, turns=4, append_tokens=50, gen_tokens=9)


# ---- traces --------------------------------------------------------------------------------------


def test_a_measured_agent_asks_for_what_its_warm_up_stored() -> None:
    stored = token_agents(SHAPE.warm_up(), SHAPE.agents, seed=5)
    measured = token_agents(SHAPE.measured(), SHAPE.agents, seed=5)
    for before, agent in zip(stored, measured, strict=True):
        first = before.ask(0)
        assert first is not None and first.gen_tokens == 1
        assert agent.ask(0) is None  # told, not sent
        ask = agent.ask(1)
        assert ask is not None
        context = first.body["prompt"]
        assert ask.body["prompt"][: len(context)] == context
        assert len(ask.body["prompt"]) == SHAPE.context_tokens + SHAPE.append_tokens
        assert agent.requests == SHAPE.turns


def test_tokens_of_a_shape_are_those_of_its_trace() -> None:
    stats = trace_stats(SHAPE.measured())
    told = SHAPE.agents * SHAPE.context_tokens
    assert SHAPE.prompt_tokens == stats.tokens_in - told
    assert SHAPE.longest_tokens == stats.max_context
    hits = sum(
        tokens // BLOCK * BLOCK for trajectory in SHAPE.measured() for tokens in _before(trajectory)
    )
    assert SHAPE.hit_tokens(BLOCK) == hits


def _before(trajectory: Any) -> list[int]:
    """Context before every measured round."""
    context, found = 0, []
    for index, item in enumerate(trajectory.rounds):
        if index:
            found.append(context)
        context += item.append_tokens + item.gen_tokens
    return found


def test_hits_dominate_in_every_experiment() -> None:
    for experiment in EXPERIMENTS.values():
        names = [case.name for case in experiment.cases]
        assert len(set(names)) == len(names)
        for case in experiment.cases:
            if not case.name.startswith("append"):
                assert case.shape.hit_ratio(BLOCK) > 0.9, (experiment.name, case.name)
            assert case.shape.longest_tokens <= 4096


def test_variants_alternate() -> None:
    case = EXPERIMENTS["pd-ratio"].cases[0]
    assert list(case.order(0)) == list(reversed(case.order(1)))
    assert set(case.order(0)) == set(ALL_MODES)


def test_a_shape_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="turns must be at least 1, got 0"):
        dataclasses.replace(SHAPE, turns=0)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        EXPERIMENTS["smoke"].with_repeats(0)


# ---- arithmetic ----------------------------------------------------------------------------------


def sample(t_s: float, **nodes: tuple[int, int]) -> Sample:
    """Bytes received by the storage NIC, and the read queue, by node."""
    return Sample(
        t_s=t_s,
        nodes={
            name: NodeSample(snic_rx_bytes=rx, snic_tx_bytes=0, cnic_rx_bytes=0, cnic_tx_bytes=0,
                             queue_tokens=queue)
            for name, (rx, queue) in nodes.items()
        },
    )  # fmt: skip


SAMPLES_BOTH = [
    sample(0.0, pe0=(0, 0), de0=(0, 5)),
    sample(1.0, pe0=(10, 5), de0=(10, 5)),
    sample(2.0, pe0=(30, 5), de0=(20, 5)),
    sample(4.0, pe0=(70, 5), de0=(40, 5)),
    sample(5.0, pe0=(90, 0), de0=(90, 5)),
]


def test_only_the_time_when_all_readers_have_work_counts() -> None:
    both = busy(SAMPLES_BOTH, ["pe0", "de0"])
    assert both.seconds == 3.0
    assert both.share == pytest.approx(0.6)
    assert both.read_bytes == {"pe0": 60, "de0": 30}
    assert both.rate_bytes_per_s == 30.0
    alone = busy(SAMPLES_BOTH, ["de0"])
    assert alone.seconds == 5.0 and alone.rate_bytes_per_s == 18.0
    assert busy(SAMPLES_BOTH[:1], ["de0"]).rate_bytes_per_s is None
    with pytest.raises(ValueError):
        busy(SAMPLES_BOTH, [])


def test_windows_add_up_to_what_was_counted() -> None:
    windows = rates(SAMPLES_BOTH, "snic_rx_bytes", 1.0)
    assert windows.read_bytes["pe0"] == [10, 20, 20, 20, 20]
    assert windows.read_bytes["de0"] == [10, 10, 10, 10, 50]
    assert rates(SAMPLES_BOTH[:1], "snic_rx_bytes", 1.0).read_bytes == {}


def test_balance_leaves_the_tail_out() -> None:
    # Windows up to second 2: 10 and 10, then 20 and 10.
    assert max_over_mean(SAMPLES_BOTH, 2.0, 100.0, 1.0) == pytest.approx((1 + 20 / 15) / 2)
    assert max_over_mean(SAMPLES_BOTH, 0.5, 100.0, 1.0) is None


def test_balance_is_of_several_requests() -> None:
    # Five requests of 8 bytes take a NIC of 20 bytes/s two seconds: 30 and 20 bytes.
    assert max_over_mean(SAMPLES_BOTH, 2.0, 20.0, 8.0) == pytest.approx(30 / 25)


def test_bounds() -> None:
    assert (pooled_bound(1, 1), pooled_bound(1, 2), pooled_bound(2, 1)) == (2.0, 3.0, 1.5)
    found = balance(
        cnic_bytes_per_s=50.0, snic_bytes_per_s=6.25, hit_bytes=100.0, miss_flops=1e3,
        node_flops_per_s=1e3,
    )  # fmt: skip
    assert found.nic_ratio == 8.0
    assert found.gb_per_pflop == pytest.approx(1e5)
    assert found.storage_over_compute == 16.0
    with pytest.raises(ValueError, match="miss_flops must be above 0"):
        balance(cnic_bytes_per_s=1, snic_bytes_per_s=1, hit_bytes=1, miss_flops=0,
                node_flops_per_s=1)  # fmt: skip


# ---- what runs say -------------------------------------------------------------------------------

EVEN = Balance(nic_ratio=8.0, gb_per_pflop=20.0, storage_over_compute=2.0)
CASE = Case("1p1d", 1, 1, SHAPE, ALL_MODES, repeats=2)


def run(variant: str, repeat: int, jct_s: float, rate: int, tpot_s: float = 0.01) -> RunResult:
    mode = Mode(variant)
    return RunResult(
        case=CASE.name,
        variant=variant,
        repeat=repeat,
        mode=variant,
        policy="",
        figures={
            "jct_s": jct_s, "failed": 0, "first_error": None, "tpot_s": tpot_s, "ttst_s": 0.1,
            "ttft_s": {"mean": 1.0, "p50": 1.0, "p99": 2.0}, "path": {"pe": 7 * 10**6, "de": 0},
        },
        nics={name: NodeBytes(snic_rx_bytes=rate, snic_tx_bytes=0, cnic_rx_bytes=0,
                              cnic_tx_bytes=0) for name in ("pe0", "de0")},
        snic_metric_bytes={"pe0": rate, "de0": 0},
        busy=busy(
            [sample(0.0, pe0=(0, 1), de0=(0, 1)), sample(1.0, pe0=(rate, 1), de0=(0, 1))],
            readers(CASE, mode),
        ),
        snic_max_over_mean=1.05,
        bytes_error=0.01,
        ttft_split_s={"read": 0.7, "prefill": 0.3},
        cpu_s={"pe0": 1.0},
    )  # fmt: skip


def all_runs() -> list[RunResult]:
    rates_of = {"basic": 100, "pe-only": 100, "dualpath": 190, "split": 170, "oracle": 1}
    return [
        run(name, repeat, jct_s=1000 / rate * (1 + repeat), rate=rate,
            tpot_s=0.012 if name == "dualpath" else 0.01)
        for repeat in range(2)
        for name, rate in rates_of.items()
    ]  # fmt: skip


def test_runs_are_compared_within_a_repeat() -> None:
    found = summarise(CASE, all_runs(), 0.95, EVEN, {"dualpath": 10.0})
    assert found.speedup["dualpath"] == pytest.approx(1.9)
    assert found.speedup["basic"] == 1.0
    checks = {check.name: check for check in found.checks}
    assert checks["busy-speedup.dualpath"].value == pytest.approx(1.9)
    assert checks["busy-speedup.dualpath"].target == pytest.approx(1.8)
    assert checks["busy-speedup.dualpath"].met
    assert not checks["busy-speedup.split"].met
    assert checks["tpot-ratio.dualpath"].value == pytest.approx(1.2)
    assert not checks["tpot-ratio.dualpath"].met
    assert checks["bytes.basic"].met
    assert "loopback" not in checks  # nobody looked
    # Runs of 5.26 and 10.5 s: their median against 10 s.
    assert checks["simulator.dualpath"].value == pytest.approx(10 / 7.894 - 1, rel=1e-3)
    assert "simulator.basic" not in checks
    dual = found.variants["dualpath"]
    assert dual.jct_runs_s == pytest.approx([5.263, 10.526], rel=1e-3)
    assert dual.run.repeat == 0  # the lower median: a run that there was


def test_bytes_past_the_nics_are_found_in_any_run() -> None:
    runs = all_runs()
    runs[3] = msgspec.structs.replace(runs[3], loopback_bytes=5 << 20)
    runs[4] = msgspec.structs.replace(runs[4], loopback_bytes=-8)
    checks = {check.name: check for check in summarise(CASE, runs, 0.95, EVEN, {}).checks}
    assert checks["loopback"].value == 5 << 20 and not checks["loopback"].met


def test_oracle_is_the_measure_only_where_storage_is_not_the_limit() -> None:
    free = dataclasses.replace(CASE, storage_limits=False)
    checks = {check.name: check for check in summarise(free, all_runs(), 0.95, EVEN, {}).checks}
    assert checks["oracle-ratio.dualpath"].value == pytest.approx(1 / 190)
    assert "busy-speedup.dualpath" not in checks
    # Whether storage was the limit is looked at, too: these runs had reads waiting all the time.
    assert checks["storage-busy.pe-only"].value == 1.0 and not checks["storage-busy.pe-only"].met
    assert all(
        "oracle-ratio" not in one.name for one in summarise(CASE, all_runs(), 0.95, EVEN, {}).checks
    )


def test_what_is_not_there_is_left_out() -> None:
    found = summarise(CASE, all_runs()[1:3], 0.95, None, {})  # pe-only and dualpath, once
    assert list(found.variants) == ["pe-only", "dualpath"]
    assert found.speedup == {}  # basic, the first, has no run
    checks = {check.name: check.value for check in found.checks}
    assert checks["busy-speedup.dualpath"] == pytest.approx(1.9)


def test_a_run_that_did_not_end_has_no_jct() -> None:
    runs = all_runs()
    at = next(index for index, one in enumerate(runs) if one.variant == "dualpath")
    runs[at] = msgspec.structs.replace(runs[at], ended="1 of 3 agents finished")
    found = summarise(CASE, runs, 0.95, EVEN, {"dualpath": 10.0})
    dual = found.variants["dualpath"]
    assert dual.jct_runs_s == [None, pytest.approx(10.526, rel=1e-3)] and dual.run.repeat == 1
    assert dual.prediction is not None
    assert dual.prediction.error == pytest.approx(10 / 10.526 - 1, rel=1e-3)


def test_capacity_is_the_highest_rate_up_to_which_all_were_served() -> None:
    def at(aps: float, **met: bool) -> CaseSummary:
        case = dataclasses.replace(CASE, name=f"aps-{aps:g}", aps=aps)
        runs = [
            msgspec.structs.replace(one, figures={**one.figures, "slo": {"met": met[one.variant]}})
            for one in all_runs()
            if one.variant in met
        ]
        return summarise(case, runs, 0.95, None, {})

    cases = [at(0.4, dualpath=True), at(0.1, basic=True, dualpath=True, split=False),
             at(0.2, basic=False, dualpath=True, split=True)]  # fmt: skip
    assert capacities(cases) == {"basic": 0.1, "dualpath": 0.4, "split": 0.0}
    assert capacities([summarise(CASE, all_runs(), 0.95, EVEN, {})]) == {}


def test_readers_are_the_nodes_of_the_sides_that_read() -> None:
    case = dataclasses.replace(CASE, prefill=2)
    assert readers(case, Mode.BASIC) == readers(case, Mode.PE_ONLY) == ["pe0", "pe1"]
    assert readers(case, Mode.SPLIT) == ["pe0", "pe1", "de0"]


def test_a_check_without_a_figure_is_not_met() -> None:
    assert not Check(name="x", value=None, target=0.0).met
    assert Check(name="x", value=1.0, target=1.0, at_most=True).met


def test_isolation_is_judged_by_each_round_itself() -> None:
    fast, slow = _Round([0.02] * 99 + [0.03], 0.0), _Round([0.04] * 99 + [0.06], 0.0)
    same = {"solo": [fast, slow, slow], "on": [fast, slow, slow], "off": [slow, slow, slow]}
    rate, p99, off = judge(same)
    assert rate.value == 1.0 and rate.met
    assert p99.value == 1.0 and p99.met
    assert off.value == 1.0 and not off.met
