"""Runs an experiment: one cluster after the other, every run that is not there yet.

DIR/experiment.json                what DIR is of; another experiment does not get in
DIR/CASE/reference/requests.jsonl  the plain vLLM's answers
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec

from dualpath.config import ClusterConfig, Mode
from dualpath.lab.cluster import lab_cluster
from dualpath.lab.costs import Costs
from dualpath.lab.describe import cluster_of
from dualpath.lab.experiments import Case, Experiment
from dualpath.lab.measuring import measure, probe
from dualpath.lab.plain import plain_vllm
from dualpath.lab.predicting import balance_of, predictions
from dualpath.lab.replaying import Replaying, RunPlace
from dualpath.lab.spec import LabSpec
from dualpath.lab.summing import summarise
from dualpath.report.lab.results import RUN, SUMMARY, ResultError, RunResult, Summary, read, write
from dualpath.serve.supervise import Listener
from dualpath.workload import ReplayOptions, compare, read_records, replay, token_agents
from dualpath.workload.records import FILE_NAME

EXPERIMENT: Final = "experiment.json"
REFERENCE: Final = "reference"
_RUN_DIR: Final = "run"

Starting = Callable[[str], AbstractContextManager[tuple[Listener, Callable[[], None]]]]


@dataclass(frozen=True, slots=True)
class Show:
    """Tells what goes on: engines that start, agents under way."""

    starting: Starting
    replaying: Replaying


async def run_experiment(experiment: Experiment, spec: LabSpec, root: Path, show: Show) -> Summary:
    """Run what is missing in ``root`` and write its summary.

    Args:
        spec: model and rates; numbers of nodes are the cases' own.

    Raises:
        ResultError: ``root`` holds another experiment, or cannot be used.
        ConfigError: no lab can be made here.
        LabError, StartFailed, RunFailed, RequestFailed: something failed; what was run stays.
    """
    _claim(root, experiment, spec)
    over: list[Case] = []
    for (prefill, decode), group in groupby(
        experiment.cases, lambda one: (one.prefill, one.decode)
    ):
        cases = list(group)
        wanted = dataclasses.replace(spec, prefill=prefill, decode=decode, mode=Mode.DUALPATH)
        await _measure(cases, wanted, root, show)
        if experiment.reference:
            await _reference(cases, cluster_of(wanted), root, show)
        over += cases
        # After every cluster: what is over can be looked at while the rest runs.
        summary = _summary(dataclasses.replace(experiment, cases=tuple(over)), spec, root)
        write(root / SUMMARY, summary)
    return summary


def _claim(root: Path, experiment: Experiment, spec: LabSpec) -> None:
    """Only one experiment lives in a folder; more repeats of it may come in later."""
    once = dataclasses.asdict(experiment.with_repeats(1))
    text = msgspec.json.encode({"experiment": once, "lab": dataclasses.asdict(spec)})
    described: dict[str, Any] = msgspec.json.decode(text)  # as it will be read
    path = root / EXPERIMENT
    if not path.exists():
        write(path, described)
    elif read(path, dict[str, Any]) != described:
        raise ResultError(f"{path}: is of another experiment or lab; name another folder")


def _places(case: Case, root: Path) -> list[RunPlace]:
    return [
        RunPlace(case, variant.name, repeat, root)
        for repeat in range(case.repeats)
        for variant in case.order(repeat)
    ]


def _missing(cases: Sequence[Case], root: Path) -> list[RunPlace]:
    """Runs that are not there, in the order in which they are run."""
    places = (place for case in cases for place in _places(case, root))
    return [place for place in places if not (place.folder / RUN).exists()]


def _costs_file(spec: LabSpec, root: Path) -> Path:
    return root / f"costs-{spec.prefill}p{spec.decode}d.json"


async def _measure(cases: Sequence[Case], spec: LabSpec, root: Path, show: Show) -> None:
    missing = _missing(cases, root)
    if not missing and _costs_file(spec, root).exists():
        return
    title = f"{spec.prefill} prefill and {spec.decode} decode nodes"
    with show.starting(title) as (listen, settled):
        run_dir = root / _RUN_DIR / f"{spec.prefill}p{spec.decode}d"
        async with lab_cluster(spec, run_dir, listen) as lab:
            settled()
            for place in missing:
                await measure(lab, place, show.replaying)
            if not _costs_file(spec, root).exists():
                costs = await probe(lab, cases[0], root / "probes" / run_dir.name, show.replaying)
                write(_costs_file(spec, root), costs)


async def _reference(cases: Sequence[Case], config: ClusterConfig, root: Path, show: Show) -> None:
    missing = [case for case in cases if not (root / case.name / REFERENCE).exists()]
    if not missing:
        return
    log = root / _RUN_DIR / "plain.log"
    with show.starting("plain vLLM") as (listen, settled):
        async with plain_vllm(config, log, listen) as url:
            settled()
            for case in missing:
                # Under its name only when it is whole.
                part = root / case.name / f"{REFERENCE}.part"
                shutil.rmtree(part, ignore_errors=True)
                agents = token_agents(case.shape.measured(), case.shape.agents, case.seed)
                with show.replaying(f"{case.name} plain vLLM") as progress:
                    result = await replay(agents, ReplayOptions(url, out=part), progress=progress)
                if not result.ok:
                    raise ResultError(f"{part / FILE_NAME}: {result.figures.first_error}")
                part.rename(root / case.name / REFERENCE)


def _summary(experiment: Experiment, spec: LabSpec, root: Path) -> Summary:
    cases, differences = [], []
    for case in experiment.cases:
        of_case = dataclasses.replace(spec, prefill=case.prefill, decode=case.decode)
        config = cluster_of(of_case)
        places = _places(case, root)
        runs = [read(place.folder / RUN, RunResult) for place in places]
        differences += _differences(case, places, root, experiment.reference)
        costs = read(_costs_file(of_case, root), Costs)
        guesses = predictions(case, config, costs, runs, spec.cnic_bytes_per_s)
        hit_ratio = case.shape.hit_ratio(config.engine.block_tokens)
        balance = balance_of(case, config, costs, spec.snic_bytes_per_s)
        cases.append(summarise(case, runs, hit_ratio, balance, guesses))
    return Summary(
        experiment=experiment.name,
        title=experiment.title,
        machine=f"{os.cpu_count()} CPU cores",
        snic_bytes_per_s=spec.snic_bytes_per_s,
        cnic_bytes_per_s=spec.cnic_bytes_per_s,
        tokens_equal=not differences,
        first_difference=differences[0] if differences else "",
        cases=cases,
    )


def _differences(case: Case, places: Sequence[RunPlace], root: Path, reference: bool) -> list[str]:
    """Of every run's tokens from the plain vLLM's, or from the first run's; oracle's mean
    nothing."""
    meant = [place for place in places if case.variant(place.variant).mode is not Mode.ORACLE]
    right = root / case.name / REFERENCE if reference else meant[0].folder
    found = []
    for place in meant:
        verdict = compare(list(read_records(right)), list(read_records(place.folder)))
        if not verdict.equal:
            found.append(f"{place.title}: {verdict.first or 'nothing to compare'}")
    return found
