"""An experiment's folder: what is run, what is read back, and whose tokens count."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from lab_kit import model_folder, ran

from dualpath.config import Mode
from dualpath.lab.costs import Costs
from dualpath.lab.experiments import DUALPATH, ORACLE, PE_ONLY, Case, Experiment, Shape
from dualpath.lab.gathering import REFERENCE, costs_file, gathered
from dualpath.lab.network import LabError
from dualpath.lab.replaying import RunFailed
from dualpath.lab.running import (
    Book,
    Show,
    Step,
    _over_slo,
    claim_folder,
    do_all,
    missing,
    run_experiment,
)
from dualpath.lab.spec import LabSpec
from dualpath.report.lab.markdown import tables_of
from dualpath.report.lab.results import (
    RUN,
    SUMMARY,
    Failure,
    ResultError,
    Summary,
    read,
    run_folder,
    write,
)
from dualpath.workload import RequestRecord, read_records
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
    write(costs_file(spec, root), costs)


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
    assert summary.tokens_equal and not summary.failures
    assert read(root / SUMMARY, Summary) == summary
    (case,) = summary.cases
    # Oracle has no KV: its tokens are neither right nor wrong.
    equal = {name: one.tokens_equal for name, one in case.variants.items()}
    assert equal == {"pe-only": True, "dualpath": True, "oracle": None}
    line = summary.to_json()
    assert line["oracle"]["tokens_equal"] is None and line["dualpath"]["tokens_equal"] is True
    assert case.speedup["dualpath"] == pytest.approx((2 + 21 / 11) / 2)
    assert set(case.variants) == {"pe-only", "dualpath", "oracle"}
    assert all(one.prediction is not None for one in case.variants.values())
    assert case.balance is not None and case.balance.nic_ratio == 8.0


def test_only_missing_runs_are_run_in_alternating_order(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    cases = list(EXPERIMENT.with_repeats(3).cases)
    assert [place.folder.name for place in missing(cases, root)] == [
        "2-pe-only", "2-dualpath", "2-oracle",
    ]  # fmt: skip
    (root / run_folder("1p1d", "dualpath", 1) / RUN).unlink()
    assert missing(cases, root)[0].folder.name == "1-dualpath"


def test_a_different_token_is_found_and_named(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    place = root / run_folder("1p1d", "dualpath", 1)
    (place / "requests.jsonl").unlink()
    answer(place, (7, 8, 1))
    summary = gathered(EXPERIMENT, spec, root)
    assert summary.tokens_equal is False
    assert summary.cases[0].variants["pe-only"].tokens_equal is True
    assert summary.cases[0].variants["dualpath"].tokens_equal is False
    assert summary.first_difference == "1p1d dualpath 2/2: agent 0 round 1: token 2: 9 / 1"


def test_a_folder_is_of_one_experiment(root: Path, spec: LabSpec) -> None:
    claim_folder(EXPERIMENT, spec, root)
    claim_folder(EXPERIMENT.with_repeats(5), spec, root)
    for experiment, lab in (
        (dataclasses.replace(EXPERIMENT, name="other"), spec),
        (EXPERIMENT, dataclasses.replace(spec, snic_mbit=100.0)),
    ):
        with pytest.raises(ResultError, match="another experiment or lab; name another folder"):
            claim_folder(experiment, lab, root)


def test_a_run_without_its_file_is_named(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    path = root / run_folder("1p1d", "oracle", 0) / RUN
    path.write_bytes(msgspec.json.encode({"case": "1p1d"}))
    with pytest.raises(ResultError, match=r"0-oracle/run.json: not written by"):
        gathered(EXPERIMENT, spec, root)


# ---- what fails ----------------------------------------------------------------------------------


def book(root: Path, spec: LabSpec, said: list[str]) -> Book:
    return Book(root, lambda *told: gathered(EXPERIMENT, spec, root, *told), said.append)


async def test_what_fails_is_told_and_the_rest_is_run_on_a_new_cluster(
    root: Path, spec: LabSpec
) -> None:
    leave(root, spec)
    said: list[str] = []
    clusters: list[list[str]] = []
    on_disk: list[int] = []

    @asynccontextmanager
    async def cluster() -> AsyncIterator[list[str]]:
        clusters.append([])
        yield clusters[-1]

    def step(name: str) -> Step[list[str]]:
        async def do(done: list[str]) -> None:
            if (root / SUMMARY).exists():
                on_disk.append(len(read(root / SUMMARY, Summary).failures))
            if name == "bad":
                raise RunFailed("bad: two\nlines")
            done.append(name)

        return Step(name, do)

    steps = [step(name) for name in ("one", "bad", "two", "three")]
    await do_all(steps, "a cluster", cluster, book(root, spec, said))
    assert clusters == [["one"], ["two", "three"]]
    assert said == ["failed: bad: two lines"]
    assert on_disk == [0, 1, 1]  # written after every step
    assert read(root / SUMMARY, Summary).failures == [Failure(where="bad", what="two lines")]


async def test_a_cluster_that_does_not_start_is_told_once(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    said: list[str] = []

    @asynccontextmanager
    async def cluster() -> AsyncIterator[None]:
        raise LabError("no carrier")
        yield

    async def never_done(_: None) -> None:
        raise AssertionError

    steps = [Step(name, never_done) for name in ("one", "two")]
    await do_all(steps, "1 prefill node", cluster, book(root, spec, said))
    assert said == ["failed: 1 prefill node: no carrier"]
    assert len(read(root / SUMMARY, Summary).cases) == 1  # what was measured before


async def test_every_cluster_has_its_turn_when_one_cannot_be_had(root: Path, spec: LabSpec) -> None:
    """Through ``run_experiment``: starting each cluster fails, none takes the others along."""
    leave(root, spec)
    shutil.rmtree(root / run_folder("1p1d", "oracle", 1))
    other = dataclasses.replace(EXPERIMENT.cases[0], name="1p2d", decode=2)
    both = dataclasses.replace(EXPERIMENT, cases=(*EXPERIMENT.cases, other))
    started: list[str] = []

    def starting(title: str) -> None:
        started.append(title)
        raise LabError("no room")

    summary = await run_experiment(both, spec, root, Show(starting, never))  # type: ignore[arg-type]
    assert started == ["1 prefill and 1 decode nodes", "1 prefill and 2 decode nodes"]
    assert [one.where for one in summary.failures] == started
    assert summary.tokens_equal is True  # of the five runs that are there
    assert len(summary.cases[0].variants["oracle"].jct_runs_s) == 1


def test_runs_count_without_costs_and_without_the_plain_vllm(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    costs_file(spec, root).unlink()
    shutil.rmtree(root / "1p1d" / REFERENCE)
    summary = gathered(EXPERIMENT, spec, root)
    (case,) = summary.cases
    assert summary.tokens_equal is None and summary.first_difference == ""
    assert case.balance is None and case.speedup["dualpath"] > 1.5
    assert all(one.prediction is None for one in case.variants.values())
    assert "Not every run's tokens were compared" in tables_of(summary)


def test_costs_that_the_simulator_cannot_use_lose_no_run(root: Path, spec: LabSpec) -> None:
    leave(root, spec)
    (Path(spec.model) / "config.json").write_text("{}")
    summary = gathered(EXPERIMENT, spec, root)
    assert [one.where for one in summary.failures] == ["1p1d: simulator"]
    assert len(summary.cases[0].variants) == 3 and summary.tokens_equal


# ---- agents that arrive --------------------------------------------------------------------------


def arriving(root: Path, met: dict[float, bool]) -> tuple[Case, ...]:
    """A case for each rate, of which ``pe-only`` was run at those in ``met``."""
    base = dataclasses.replace(EXPERIMENT.cases[0], repeats=1)
    cases = tuple(
        dataclasses.replace(base, name=f"aps-{aps:g}", aps=aps) for aps in (0.1, 0.2, 0.4)
    )
    for case in cases:
        if case.aps in met:
            place = missing([case], root)[0]
            run = ran(Mode.PE_ONLY, {"pe0": 1})
            figures = {**run.figures, "slo": {"met": True, "attained": 1.0}}
            ended = "" if met[case.aps] else "2 of 6 agents finished within 900 s"
            run = msgspec.structs.replace(run, case=case.name, figures=figures, ended=ended)
            write(place.folder / RUN, run)
    return cases


def test_a_rate_that_cannot_be_served_is_a_result(root: Path, spec: LabSpec) -> None:
    cases = arriving(root, {0.1: True, 0.2: False})
    experiment = Experiment("online", "made", cases)
    answer(root / "aps-0.1" / REFERENCE, (7, 8, 9))
    answer(root / run_folder("aps-0.1", "pe-only", 0), (7, 8, 9))
    answer(root / "aps-0.2" / REFERENCE, (7, 8, 9))
    with RecordWriter(root / run_folder("aps-0.2", "pe-only", 0)) as writer:  # one of two agents
        writer.write(next(read_records(root / "aps-0.2" / REFERENCE)))
    summary = gathered(experiment, spec, root)
    assert summary.capacity_aps == {"pe-only": 0.1}
    assert summary.tokens_equal is True  # of those that were answered
    late = summary.cases[1].variants["pe-only"]
    assert late.jct_runs_s == [None] and late.run.jct_s is None
    assert "pe-only" not in summary.cases[1].speedup
    assert "not served" in tables_of(summary)


def test_rates_above_one_that_missed_the_limits_are_left_out_when_asked(root: Path) -> None:
    cases = arriving(root, {0.1: True, 0.2: False})
    low, middle, high = (missing([dataclasses.replace(case, name="x")], root)[0] for case in cases)
    assert _over_slo(low, cases) == _over_slo(middle, cases) == ""
    assert _over_slo(high, cases) == "pe-only missed the limits on TTFT or TPOT at 0.2 agents/s"
    other = dataclasses.replace(high, variant="dualpath")
    assert _over_slo(other, cases) == ""


def test_every_run_has_an_end() -> None:
    case = EXPERIMENT.cases[0]
    assert case.limit_s == 900.0
    assert dataclasses.replace(case, aps=0.1).limit_s == 900.0 + 2 * 2 / 0.1
