"""``dualpath plan``: the contract's keys, and bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli.main import run

pytestmark = pytest.mark.unit

PAPER = [
    "plan",
    "--gpus-per-node",
    "8",
    "--snic-gbps",
    "400",
    "--cnic-gbps",
    "400",
    "--memory-gbs",
    "500",
]


def answer(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert run([*PAPER, *more, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return dict(json.loads(line))


def test_the_papers_range_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys)
    assert (found["pd_min"], found["pd_max"]) == (1 / 7, 7 / 2)
    assert (found["pd_min_ratio"], found["pd_max_ratio"]) == ("1/7", "7/2")
    assert found["summed"] == {"pd_min": 1 / 7, "pd_max": 7 / 2}
    assert found["bounds"] == {
        "pe_cnic_write": 1 / 7, "de_cnic_read": 6, "de_cnic_write": 3.5, "de_dram": 3.5,
    }  # fmt: skip
    assert found["binding"]["pd_max"] == ["de_cnic_write", "de_dram"]
    assert found["conditions"] == {"pe_cnic_read": True, "pe_dram": True}
    assert found["empty"] is False


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PAPER, "--model", "ds-v3.2", "--workload", "32k"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bottleneck-free P/D: 1/7 .. 7/2" in out
    assert "left out of the bounds" in out


def test_an_empty_range_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--memory-gbs", "100")
    assert found["empty"] is True
    assert found["impossible"] == ["de_dram"]
    assert run([*PAPER, "--memory-gbs", "100"]) == 0
    assert "no P/D ratio is free of bottlenecks" in capsys.readouterr().out


def test_model_workload_and_prices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "work.jsonl"
    trace.write_text('{"id": "a", "rounds": [[1000, 100, null], [100, 100, null]]}\n')
    found = answer(
        capsys, "--model", "qwen2.5-32b", "--workload", str(trace),
        "--price-prefill-node", "30", "--price-decode-node", "10",
    )  # fmt: skip
    bound = found["storage_bound"]
    # 1,100 hit tokens of 262,144 bytes a trajectory, by two SNICs of 50 GB/s
    assert bound["agents_per_s"] == pytest.approx(100e9 / (1100 * 262_144))
    tokens = bound["tokens_in_per_s"] + bound["tokens_out_per_s"]
    assert tokens == pytest.approx(bound["agents_per_s"] * 2400)
    assert bound["cost_per_million_tokens"] == pytest.approx(40 / 3600 / tokens * 1e6)
    extra = found["extra"]
    assert extra["miss_per_hit_byte"] == pytest.approx(1100 / 1100)
    assert extra["write_back_per_hit_byte"] == pytest.approx(1300 / 1100)
    assert extra["range"]["pd_max"] < found["pd_max"]


def test_models_by_the_simulators_names_and_by_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "work.jsonl"
    trace.write_text('{"id": "a", "rounds": [[1000, 100, null], [100, 100, null]]}\n')
    assert answer(capsys, "--model", "ds-660b")["model"]["name"] == "ds-v3.2"
    assert "model" not in answer(capsys, "--workload", str(trace))
    prices = ("--price-prefill-node", "1", "--price-decode-node", "1")
    found = answer(capsys, "--workload", str(trace), *prices)
    assert found["model"]["name"] == "ds-v3.2"
    record = answer(capsys, "--model", "ds-v3.2", "--kv-record", "flashmla")["model"]
    assert record["kv_bytes_per_token"] == 788 * 61


def test_uneven_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = answer(capsys, "--prefill-snics", "400,200", "--decode-snics", "400")["cluster"]
    assert cluster["bottleneck_free"] is True
    assert cluster["links"]["pe_snic"]["capacity_gbs"] == 50
    assert cluster["links"]["de_dram"]["gbs"] == 3 * 50 + 2 * 75
    crowded = answer(capsys, "--prefill-snics", ",".join(["400"] * 8), "--decode-snics", "400")
    assert crowded["cluster"]["bottleneck_free"] is False
    assert crowded["cluster"]["binding"] in ("de_cnic_write", "de_dram")


def test_decode_nodes_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--decode-snic-gbps", "200", "--decode-memory-gbs", "275")
    assert found["bounds"]["de_dram"] == (275 - 3 * 25) / (2 * 50)
    assert found["bounds"]["pe_cnic_write"] == 25 / 350


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--snic-gbps", "0"], "--snic-gbps: must be above 0"),
        (["--memory-gbs", "nan"], "--memory-gbs: must be above 0"),
        (["--decode-cnic-gbps", "-1"], "--decode-cnic-gbps: must be above 0"),
        (["--gpus-per-node", "0"], "--gpus-per-node"),
        (["--model", "nope"], "--model: 'nope' is neither a path nor one of ds-v3.2"),
        (["--kv-record", "zip", "--model", "ds-v3"], "--kv-record: 'zip'"),
        (["--kv-record", "plain"], "--kv-record: needs --model"),
        (["--workload", "nope"], "--workload: 'nope' is neither a file nor one of 32k"),
        (["--nodes", "6"], "--nodes: needs --workload"),
        (["--price-prefill-node", "1"], "needs --price-decode-node"),
        (["--price-prefill-node", "1", "--price-decode-node", "1"], "needs --workload"),
        (["--prefill-snics", "400"], "needs --decode-snics"),
        (["--prefill-snics", "400,x", "--decode-snics", "400"], "--prefill-snics: 'x'"),
        (["--prefill-snics", "9000,1", "--decode-snics", "1"], "cannot be kept busy"),
        (
            ["--nodes", "3", "--workload", "32k", "--model", "qwen3-235b"],
            "no calibrated speed of 'qwen3-235b'",
        ),
        (
            ["--nodes", "3", "--workload", "32k", "--model", "ds-27b", "--decode-gpus", "4"],
            "the simulated nodes are all alike",
        ),
        (
            ["--nodes", "3", "--workload", "32k", "--model", "ds-27b", "--mode", "magic"],
            "'magic' is not one of",
        ),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], more: list[str], named: str
) -> None:
    assert run([*PAPER, *more]) == 2
    err = capsys.readouterr().err
    assert named in err
    assert len(err.splitlines()) == 1


def test_a_trace_or_model_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert run([*PAPER, "--workload", str(bad)]) == 2
    assert f"{bad}:1: id: is missing" in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["WeirdForCausalLM"]}')
    assert run([*PAPER, "--model", str(tmp_path)]) == 2
    assert "'WeirdForCausalLM' is not known" in capsys.readouterr().err
