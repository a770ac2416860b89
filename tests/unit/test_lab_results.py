"""The lab's pure parts: traces, the arithmetic on samples, what runs say, files, the page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpath.config import Mode
from dualpath.lab.experiments import ALL_MODES, EXPERIMENTS, Case, Shape
from dualpath.lab.isolation import _Round, judge
from dualpath.lab.summing import readers, summarise
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
    SAMPLES,
    SUMMARY,
    Check,
    IsolationResult,
    NodeBytes,
    ResultError,
    RunResult,
    Summary,
    read,
    read_samples,
    write,
    write_samples,
)
from dualpath.report.lab.sheet import lab_page
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
    assert all(
        "oracle-ratio" not in one.name for one in summarise(CASE, all_runs(), 0.95, EVEN, {}).checks
    )


def test_a_run_that_failed_or_is_missing_is_named() -> None:
    broken = msgspec.structs.replace(
        all_runs()[0], figures={"jct_s": None, "failed": 2, "first_error": "engine lost"}
    )
    with pytest.raises(ValueError, match="1p1d/0-basic: engine lost"):
        summarise(CASE, [broken], 0.95, EVEN, {})
    with pytest.raises(ValueError, match="pe-only: no run"):
        summarise(CASE, all_runs()[:1], 0.95, EVEN, {})


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


# ---- files and the page --------------------------------------------------------------------------


def summary() -> Summary:
    return Summary(
        experiment="pd-ratio",
        title="a <title>",
        machine="2 CPU cores",
        snic_bytes_per_s=6.25e6,
        cnic_bytes_per_s=50e6,
        tokens_equal=True,
        first_difference="",
        cases=[summarise(CASE, all_runs(), 0.95, EVEN, {"dualpath": 10.0})],
    )


def test_the_line_has_replays_keys_by_mode() -> None:
    line = summary().to_json()
    assert line["tokens_equal"] is True
    for mode in ("basic", "pe-only", "dualpath", "split", "oracle"):
        assert line[mode]["jct_s"] > 0 and "ttft_s" in line[mode] and "path" in line[mode]
    checks = {check["name"]: check for check in line["cases"][0]["checks"]}
    assert checks["busy-speedup.dualpath"]["met"] is True


def test_the_page_is_one_file_with_everything(tmp_path: Path) -> None:
    whole = summary()
    write(tmp_path / SUMMARY, whole)
    assert read(tmp_path / SUMMARY, Summary) == whole
    for one in whole.cases[0].variants.values():
        (tmp_path / one.run.folder).mkdir(parents=True)
        write_samples(tmp_path / one.run.folder / SAMPLES, SAMPLES_BOTH)
        assert read_samples(tmp_path / one.run.folder / SAMPLES) == SAMPLES_BOTH
    text = lab_page(tmp_path)
    assert "a &lt;title&gt;" in text
    for heading in (
        "How long agents take", "Storage NICs over time, 1p1d", "time to the first token goes",
        "Who reads the stored KV", "The simulator against the measurement", "Targets", "Figures",
    ):  # fmt: skip
        assert heading in text
    assert not re.search(r"(src|href)=\"(?!#)", text)


def isolation(rate_target: float) -> Summary:
    results = [
        IsolationResult(name=name, ops=9, nbytes=8, bytes_per_s=rate, p50_s=0.1, p99_s=0.2,
                        kv_bytes_per_s=0.0)
        for name, rate in (("solo", 100.0), ("on", 99.0), ("off", 50.0))
    ]  # fmt: skip
    checks = [
        Check(name="rate.on", value=0.99, target=rate_target),
        Check(name="p99.on", value=1.0, target=2.0, at_most=True),
    ]
    return Summary(
        experiment="isolation", title="classes", machine="", snic_bytes_per_s=1.0,
        cnic_bytes_per_s=1.0, tokens_equal=None, first_difference="", cases=[],
        isolation=results, isolation_checks=checks,
    )  # fmt: skip


def test_isolations_plots_show_the_targets_that_were_judged_by(tmp_path: Path) -> None:
    plots = []
    for target in (0.95, 0.95, 0.5):
        write(tmp_path / SUMMARY, isolation(target))
        found = re.search(r"<svg.*</svg>", lab_page(tmp_path), re.DOTALL)
        assert found is not None
        plots.append(found[0])
    assert plots[0] == plots[1] != plots[2]
    line = isolation(0.95).to_json()
    assert line["tokens_equal"] is None  # nothing was generated
    assert [check["met"] for check in line["isolation_checks"]] == [True, True]


def test_samples_that_cannot_be_written_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(ResultError, match=r"run/samples.jsonl: cannot be written"):
        write_samples(tmp_path / "run" / SAMPLES, SAMPLES_BOTH)


def test_a_folder_without_results_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"summary.json: cannot be read"):
        lab_page(tmp_path)
    (tmp_path / SUMMARY).write_text("{}")
    with pytest.raises(ResultError, match=r"not written by 'dualpath lab run'"):
        lab_page(tmp_path)
