"""Every published row has an experiment, is judged by its own rule, and cheap ones are met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.cli.main import run
from dualpath.report.paper import reproduce as reproduction
from dualpath.report.paper.experiments import EXPERIMENTS
from dualpath.report.paper.jobs import Job, run_job, trajectories
from dualpath.report.paper.published import ALL, BY_NAME, Kind, Published, UnknownFigure, select
from dualpath.report.paper.reproduce import judge, reproduce
from dualpath.report.paper.sheet import sheet
from dualpath.workload.synth import ROWS, synthesise

pytestmark = pytest.mark.unit

CONTRACT = """
pd_min pd_max table1.MODEL.16k table1.MODEL.64k
ablation.layerwise ablation.dualpath ablation.scheduling speedup.660b.max speedup.27b.max
pd.mean pd.max pd.pair1 pd.pair2 pd.pair3 scale.jct_small scale.jct_large scale.ratio
snic.round_robin snic.scheduler attention.maxavg capacity.660b capacity.27b capacity.mean
workingset.0.1 workingset.0.45 oracle.660b oracle.27b append.trend gen.trend
ttft_split.trend jct_aps.trend qwen.trend scheduler.cores
"""
MODELS = ("qwen2.5-32b", "gpt-oss-120b", "qwen3-235b", "ds-v3.2", "ds-v3")


def test_rows_have_the_names_that_scripts_rely_on() -> None:
    wanted = {name.replace("MODEL", model) for name in CONTRACT.split() for model in MODELS}
    wanted |= {
        f"table2.{row}.{column}"
        for row in ("32k", "48k", "64k")
        for column in ("turns", "append", "gen", "total", "context")
    }
    wanted |= {f"online.{f}.{s}" for f in ("ttft", "ttst", "tpot") for s in ("small", "large")}
    assert {row.name for row in ALL} == wanted
    assert len(BY_NAME) == len(ALL), "names are unique"


def test_every_row_is_answered_by_exactly_one_experiment() -> None:
    answered = [group for _, groups in EXPERIMENTS.values() for group in groups]
    assert sorted(answered) == sorted({row.group for row in ALL})


def test_rows_can_be_asked_for_by_table_group_and_name() -> None:
    assert select("all") == ALL
    assert {row.group for row in select("table3")} == {"scale", "online"}
    assert [row.name for row in select("pd.max")] == ["pd.max"]
    with pytest.raises(UnknownFigure, match="'figure99' is not one of all, table1"):
        select("figure99")


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(paper=st.floats(0.01, 1e6), error=st.floats(-2, 2), tolerance=st.floats(0.001, 1))
def test_a_relative_row_is_met_within_its_tolerance(
    paper: float, error: float, tolerance: float
) -> None:
    row = judge(Published("r", paper, Kind.REL, tolerance, "", ""), paper * (1 + error))
    assert row.error == pytest.approx(error, abs=1e-6)
    if abs(abs(error) - tolerance) > 1e-6:
        assert row.met == (abs(error) < tolerance)


@given(paper=finite, ours=finite, tolerance=st.floats(0, 1e6))
def test_absolute_upper_and_trend_rows(paper: float, ours: float, tolerance: float) -> None:
    absolute = judge(Published("r", paper, Kind.ABS, tolerance, "", ""), ours)
    assert absolute.met == (abs(ours - paper) <= tolerance)
    upper = judge(Published("r", paper, Kind.UPPER, tolerance, "", ""), ours)
    assert upper.met == (ours <= tolerance)
    for holds in (0.0, 1.0):
        assert judge(Published("r", None, Kind.TREND, 0, "", ""), holds).met == bool(holds)


@pytest.mark.parametrize("calibration", ["C1", "C2", "C3"])
def test_rows_that_need_no_simulation_are_met(calibration: str) -> None:
    rows = (*select("pd_min"), *select("pd_max"), *select("table1"), *select("table2"))
    found = reproduce(rows, calibration)
    assert [row.name for row in found.rows if not row.met] == []
    assert len(found.rows) == 27


def test_scaled_trajectories_keep_their_limit() -> None:
    row = ROWS["32k"]
    job = Job("ds-660b-2p4d", "basic", "32k", "C1", agents=1, append_scale=4, gen_scale=2)
    plain = list(synthesise(row))
    scaled = list(trajectories(job))
    assert len(scaled) == len(plain)
    shorter = 0
    for one, other in zip(plain, scaled, strict=True):
        for before, after in zip(one.rounds, other.rounds, strict=False):
            assert after.append_tokens == 4 * before.append_tokens
            assert after.gen_tokens == 2 * before.gen_tokens
        assert other.total_tokens <= row.max_tokens or len(other.rounds) == 1
        shorter += len(other.rounds) < len(one.rounds)
    assert shorter > 100


def test_results_are_kept_for_the_same_code_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("ds-27b-1p1d", "dualpath", "32k", "C1", agents=2)
    result = run_job(job)
    path = tmp_path / "kept.jsonl"
    reproduction._Cache(path).put(job, result)
    kept = reproduction._Cache(path).get(job)
    assert kept == json.loads(json.dumps(result))
    monkeypatch.setattr(reproduction, "_fingerprint", lambda: "other code")
    assert reproduction._Cache(path).get(job) is None


def test_the_command_prints_one_json_object_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["reproduce", "table1", "--both", "--json", "--out", str(tmp_path / "r")])
    assert status == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["calibration"] == "C2" and answer["other"]["calibration"] == "C1"
    row = answer["rows"][0]
    assert {"name", "paper", "ours", "error", "kind", "tolerance", "met", "note"} <= set(row)
    assert row["name"] == "table1.qwen2.5-32b.16k" and row["kind"] == "rel" and row["met"] is True
    page = (tmp_path / "r" / "reproduction.html").read_text(encoding="utf-8")
    assert "table1.ds-v3.64k" in page and "http" not in page.replace("http://www.w3.org", "")
    saved = json.loads((tmp_path / "r" / "reproduction-C1.json").read_text(encoding="utf-8"))
    assert len(saved["rows"]) == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["figure99"], "'figure99' is not one of all"),
        (["table1", "--calibration", "C9"], "--calibration: 'C9' is not one of C1, C2, C3"),
        (["table1", "--out", "/dev/null/x"], "--out: /dev/null/x: cannot be made"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_a_missed_row_is_shown_as_missed() -> None:
    row = judge(BY_NAME["pd.max"], 1.0)
    text = sheet(reproduction.Reproduction("C1", (row,), {}), None)
    assert "0 of 1 rows are within tolerance" in text and ">missed<" in text
