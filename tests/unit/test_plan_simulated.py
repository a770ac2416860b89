"""Divisions tried by the simulator itself."""

from __future__ import annotations

import json
from fractions import Fraction as F
from pathlib import Path

import pytest

from dualpath.cli.main import run
from dualpath.plan.price import storage_bound
from dualpath.plan.search import best_of, search
from dualpath.plan.simulated import SimulatedTrial, Template, ceiling_aps
from dualpath.plan.traffic import Node
from dualpath.workload.stats import trace_stats
from dualpath.workload.synth import regular
from dualpath.workload.trace import write_trace

pytestmark = pytest.mark.unit

NODE = Node(8, F(2), F(50), F(500))  # a slow SNIC: what is read from storage decides
AGENTS = list(regular(4, 6, 500, 4, first_append_tokens=20_000))


def trial(mode: str = "dualpath") -> SimulatedTrial:
    template = Template("ds-27b", mode, NODE, slo_ttft_s=4.0, slo_tpot_s=0.05)
    return SimulatedTrial(template, AGENTS, trace_stats(AGENTS), 0, 40.0, 40.0)


def test_the_template_has_the_rates_it_is_given() -> None:
    spec = Template("ds-27b", "basic", Node(4, F(10), F(20), F(100)), 1.5, 0.02).spec(2, 3)
    assert (spec.cluster.prefill_nodes, spec.cluster.decode_nodes) == (2, 3)
    assert spec.cluster.gpus_per_node == 4
    assert spec.cluster.snic_bytes_per_s == 10e9
    assert spec.cluster.cnic_bytes_per_s == 20e9
    assert (spec.slo_ttft_s, spec.slo_tpot_s, spec.features.name) == (1.5, 0.02, "basic")
    with pytest.raises(ValueError, match="'nope' is not one of"):
        Template("ds-27b", "nope", NODE, 1, 1).spec(1, 1)


def test_who_reads_sets_the_ceiling() -> None:
    stats = trace_stats(AGENTS)

    def ceiling(mode: str) -> float:
        return ceiling_aps(trial(mode).template.spec(1, 3), stats)

    per_node = storage_bound(stats, 21_720, 2.0).agents_per_s
    assert ceiling("basic") == ceiling("pe-only") == pytest.approx(per_node)
    assert ceiling("dualpath") == ceiling("split") == pytest.approx(4 * per_node)
    assert ceiling("oracle") == ceiling("comparator") == float("inf")


def test_loads_below_and_above_what_storage_can_feed() -> None:
    one = trial()
    limit = ceiling_aps(one.template.spec(1, 1), one.stats)
    easy = one(1, 1, limit / 10)
    assert easy.slo_met
    assert easy.ttft_s is not None
    assert easy.tokens_in_per_s == pytest.approx(limit / 10 * one.stats.tokens_in / 4)
    over = one(1, 1, limit * 1.01)
    assert not over.slo_met
    assert over.ttft_s is None


def test_the_second_path_lets_one_prefill_node_serve_more() -> None:
    found = {}
    for mode in ("pe-only", "dualpath"):
        one = trial(mode)
        guess = ceiling_aps(one.template.spec(1, 1), one.stats) / 2
        best = best_of(list(search(2, one, guess)))
        assert best is not None
        assert best.aps <= 2 * guess
        found[mode] = best.aps
    assert found["dualpath"] > 1.3 * found["pe-only"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    write_trace(path, AGENTS)
    status = run(
        [
            "plan", "--gpus-per-node", "8", "--snic-gbps", "16", "--cnic-gbps", "400",
            "--memory-gbs", "500", "--model", "ds-27b", "--workload", str(path), "--nodes", "2",
            "--warmup", "40", "--measure", "20", "--price-prefill-node", "3",
            "--price-decode-node", "1", "--json",
        ]
    )  # fmt: skip
    assert status == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["search"]
    best = found["best"]
    assert (best["prefill_nodes"], best["decode_nodes"]) == (1, 1)
    assert best["aps"] > 0
    assert best["bottleneck_free"] is True
    tokens = best["tokens_in_per_s"] + best["tokens_out_per_s"]
    assert best["cost_per_million_tokens"] == pytest.approx(4 / 3600 / tokens * 1e6)
    assert found["candidates"] == [best]
    assert found["warmup_too_short"] is (best["jct_s"] is None or best["jct_s"] > 40)
    assert "1 of 1 divisions simulated" in captured.err
