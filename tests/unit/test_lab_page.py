"""The lab's result files, the page and the Markdown tables that are made of them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from test_lab_results import CASE, EVEN, SAMPLES_BOTH, all_runs

from dualpath.cli.main import run as run_cli
from dualpath.lab.summing import summarise
from dualpath.report.lab.results import (
    SAMPLES,
    SUMMARY,
    Check,
    Failure,
    IsolationResult,
    ResultError,
    Summary,
    read,
    read_samples,
    write,
    write_samples,
)
from dualpath.report.lab.sheet import lab_page

pytestmark = pytest.mark.unit


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


def test_the_page_tells_what_is_missing(tmp_path: Path) -> None:
    failed = msgspec.structs.replace(
        summary(), failures=[Failure(where="1p2d split 1/3", what="engine <lost>")],
        skipped=["aps-0.4 basic 1/1: missed"], tokens_equal=None,
    )  # fmt: skip
    cases = [msgspec.structs.replace(failed.cases[0], balance=None)]
    write(tmp_path / SUMMARY, msgspec.structs.replace(failed, cases=cases))
    for one in cases[0].variants.values():
        write_samples(tmp_path / one.run.folder / SAMPLES, SAMPLES_BOTH)
    text = lab_page(tmp_path)
    assert "1p2d split 1/3" in text and "engine &lt;lost&gt;" in text
    assert "Left out: aps-0.4 basic 1/1: missed." in text
    assert "Every token is the plain" not in text and "DIFFER" not in text


def test_markdown_has_every_experiment_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a" / SUMMARY, summary())
    write(tmp_path / "b" / SUMMARY, isolation(0.95))
    assert run_cli(["report", str(tmp_path), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "**`pd-ratio`**, storage and compute NICs of 50 and 400 Mbit/s" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 1p1d | `dualpath` |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:7] == ["5.26", "5.26, 10.5", "1.90", "1", "0.1"] and cells[10] == "10 s (+27%)"
    assert "| `on` | 0 | 100 | 200 | 0 |" in text
    tables = [line.count("|") for line in text.splitlines() if line.startswith("| ---")]
    heads = text.splitlines()
    for at, line in enumerate(heads):
        if line.startswith("| ---"):
            assert heads[at - 1].count("|") == line.count("|")
    assert len(tables) == 4
    assert run_cli(["report", str(tmp_path / "c"), "--markdown"]) == 2
    assert "no summary.json in it" in capsys.readouterr().err


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
