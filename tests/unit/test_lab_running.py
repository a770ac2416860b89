"""An experiment's folder: what is run, what is read back, and whose tokens count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from lab_kit import model_folder, ran

from dualpath.config import Mode
from dualpath.lab.costs import Costs
from dualpath.lab.experiments import DUALPATH, ORACLE, PE_ONLY, Case, Experiment, Shape
from dualpath.lab.running import (
    REFERENCE,
    Show,
    _claim,
    _costs_file,
    _missing,
    _summary,
    run_experiment,
)
from dualpath.lab.spec import LabSpec
from dualpath.report.lab.results import RUN, ResultError, run_folder, write
from dualpath.workload import RequestRecord
from dualpath.workload.records import RecordWriter

pytestmark = pytest.mark.unit

SHAPE = Shape(agents=2, context_tokens=1536, turns=1, append_tokens=64, gen_tokens=3)
EXPERIMENT = Experiment(
    "made", "made by hand", (Case("1p1d", 1, 1, SHAPE, (PE_ONLY, DUALPATH, ORACLE), repeats=2),)
)


@pytest.fixture
def spec(tmp_path: Path) -> LabSpec:
    return LabSpec(model_folder(tmp_path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "out"


def never(title: str) -> None:
    raise AssertionError(f"started: {title}")


def leave(root: Path, spec: LabSpec) -> None:
    """All runs of the experiment, oracle's with tokens of its own."""
    folder = root / "1p1d"
    answer(folder / REFERENCE, (7, 8, 9))
    for repeat in range(2):
        for mode, jct_s in ((Mode.PE_ONLY, 20.0), (Mode.DUALPATH, 10.0), (Mode.ORACLE, 1.0)):
            place = root / run_folder("1p1d", mode.value, repeat)
            answer(place, (1, 1, 1) if mode is Mode.ORACLE else (7, 8, 9))
            nodes = {"pe0": 60_000_000, "de0": 60_000_000 if mode is Mode.DUALPATH else 0}
            write(place / RUN, ran(mode, nodes, repeat, jct_s + repeat))
    costs = Costs(prefill_tokens_per_s=1e4, decode_step_s=0.01, decode_step_per_request_s=0.0,
                  decode_start_s=0.0, request_overhead_s=0.0, context_tokens=1536)  # fmt: skip
    write(_costs_file(spec, root), costs)


def answer(folder: Path, tokens: tuple[int, ...]) -> None:
    with RecordWriter(folder) as writer:
        for agent in range(SHAPE.agents):
            writer.write(
                RequestRecord(agent=agent, round=1, name="", prompt_digest="same", asked_tokens=3,
                              start_s=0.0, completion_tokens=3, token_ids=tokens)
            )  # fmt: skip


async def test_what_is_there_is_not_run_again(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    summary = await run_experiment(EXPERIMENT, spec, root, Show(never, never))  # type: ignore[arg-type]
    assert summary.tokens_equal
    (case,) = summary.cases
    assert case.speedup["dualpath"] == pytest.approx((2 + 21 / 11) / 2)
    assert set(case.variants) == {"pe-only", "dualpath", "oracle"}
    assert all(one.prediction is not None for one in case.variants.values())
    assert case.balance.nic_ratio == 8.0


def test_only_missing_runs_are_run_in_alternating_order(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    cases = list(EXPERIMENT.with_repeats(3).cases)
    assert [place.folder.name for place in _missing(cases, root)] == [
        "2-pe-only", "2-dualpath", "2-oracle",
    ]  # fmt: skip
    (root / run_folder("1p1d", "dualpath", 1) / RUN).unlink()
    assert _missing(cases, root)[0].folder.name == "1-dualpath"


def test_a_different_token_is_found_and_named(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    place = root / run_folder("1p1d", "dualpath", 1)
    (place / "requests.jsonl").unlink()
    answer(place, (7, 8, 1))
    summary = _summary(EXPERIMENT, spec, root)
    assert not summary.tokens_equal
    assert summary.first_difference == "1p1d dualpath 2/2: agent 0 round 1: token 2: 9 / 1"


def test_a_folder_is_of_one_experiment(root: Path, spec: LabSpec) -> None:
    _claim(root, EXPERIMENT, spec)
    _claim(root, EXPERIMENT.with_repeats(5), spec)
    for experiment, lab in (
        (dataclasses.replace(EXPERIMENT, name="other"), spec),
        (EXPERIMENT, dataclasses.replace(spec, snic_mbit=100.0)),
    ):
        with pytest.raises(ResultError, match="another experiment or lab; name another folder"):
            _claim(root, experiment, lab)


def test_a_run_without_its_file_is_named(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    path = root / run_folder("1p1d", "oracle", 0) / RUN
    path.write_bytes(msgspec.json.encode({"case": "1p1d"}))
    with pytest.raises(ResultError, match=r"0-oracle/run.json: not written by"):
        _summary(EXPERIMENT, spec, root)
