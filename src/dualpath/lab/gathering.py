"""From an experiment's folder to its summary, of whatever runs are there.

DIR/CASE/reference/requests.jsonl  the plain vLLM's answers
DIR/costs-1p1d.json                what engines of such a cluster need, for the simulator
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dualpath.config import Mode
from dualpath.lab.costs import Costs
from dualpath.lab.describe import cluster_of
from dualpath.lab.experiments import Case, Experiment
from dualpath.lab.predicting import balance_of, predictions
from dualpath.lab.replaying import RunPlace
from dualpath.lab.spec import LabSpec
from dualpath.lab.summing import capacities, summarise
from dualpath.report.lab.bounds import Balance
from dualpath.report.lab.results import (
    RUN,
    CaseSummary,
    Failure,
    ResultError,
    RunResult,
    Summary,
    read,
)
from dualpath.workload import RecordError, RequestRecord, compare, read_records

REFERENCE: Final = "reference"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What token by token comparisons with the plain vLLM gave.

    Attributes:
        equal: by variant; None where not every run could be compared. A variant of which nobody
            was answered is not in it.
        differences: one line each.
    """

    equal: dict[str, bool | None] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


def places_of(case: Case, root: Path) -> list[RunPlace]:
    """All runs of a case, in the order in which they are run."""
    return [
        RunPlace(case, variant.name, repeat, root)
        for repeat in range(case.repeats)
        for variant in case.order(repeat)
    ]


def costs_file(spec: LabSpec, root: Path) -> Path:
    """Where the costs of a cluster of so many nodes are kept."""
    return root / f"costs-{spec.prefill}p{spec.decode}d.json"


def gathered(
    experiment: Experiment,
    spec: LabSpec,
    root: Path,
    failures: Sequence[Failure] = (),
    skipped: Sequence[str] = (),
) -> Summary:
    """The summary of the runs that are in ``root``.

    Args:
        spec: model and rates; numbers of nodes are the cases' own.
        failures, skipped: what the summary tells beside them. A case whose costs the simulator
            cannot work with is one more failure.

    Raises:
        ResultError: a run's files cannot be read.
    """
    cases: list[CaseSummary] = []
    told = list(failures)
    differences: list[str] = []
    equal: list[bool | None] = []
    for case in experiment.cases:
        places = [place for place in places_of(case, root) if (place.folder / RUN).exists()]
        if not places:
            continue
        runs = [read(place.folder / RUN, RunResult) for place in places]
        meant = [one for one in places if case.variant(one.variant).mode is not Mode.ORACLE]
        verdicts = verdicts_of(case, meant, runs, root)
        differences += verdicts.differences
        equal += verdicts.equal.values()
        of_case = dataclasses.replace(spec, prefill=case.prefill, decode=case.decode)
        guesses, balance = _from_costs(case, of_case, runs, root, told)
        hit_ratio = case.shape.hit_ratio(cluster_of(of_case).engine.block_tokens)
        cases.append(summarise(case, runs, hit_ratio, balance, guesses, verdicts.equal))
    return Summary(
        experiment=experiment.name,
        title=experiment.title,
        machine=f"{os.cpu_count()} CPU cores",
        snic_bytes_per_s=spec.snic_bytes_per_s,
        cnic_bytes_per_s=spec.cnic_bytes_per_s,
        tokens_equal=all_equal(equal),
        first_difference=differences[0] if differences else "",
        cases=cases,
        failures=told,
        skipped=list(skipped),
        capacity_aps=capacities(cases),
    )


def all_equal(found: Iterable[bool | None]) -> bool | None:
    """Of several verdicts: False when one is; None when one is not known, or there is none."""
    verdicts = list(found)
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


def verdicts_of(
    case: Case, places: Iterable[RunPlace], runs: Iterable[RunResult], root: Path
) -> Verdicts:
    """Hold the tokens of ``places`` to the plain vLLM's, as far as both are there.

    Args:
        runs: at least those of ``places``; of one that did not end, answers that there are count.

    Raises:
        ResultError: answers cannot be read.
    """
    right_folder = root / case.name / REFERENCE
    right = _records(right_folder) if right_folder.exists() else None
    cut_short = {run.folder for run in runs if run.ended}
    found = Verdicts()
    by_variant: dict[str, list[bool | None]] = {}
    for place in places:
        verdicts = by_variant.setdefault(place.variant, [])
        if right is None:
            verdicts.append(None)
            continue
        mine, theirs = _records(place.folder), right
        if str(place.folder.relative_to(root)) in cut_short:
            mine = [one for one in mine if one.ok]
            answered = {(one.agent, one.round) for one in mine}
            theirs = [one for one in right if (one.agent, one.round) in answered]
            if not mine:
                continue
        try:
            verdict = compare(theirs, mine)
        except ValueError as error:
            raise ResultError(f"{place.folder}: {error}") from None
        verdicts.append(verdict.equal)
        if not verdict.equal:
            found.differences.append(f"{place.title}: {verdict.first or 'nothing to compare'}")
    found.equal.update({name: all_equal(some) for name, some in by_variant.items() if some})
    return found


def _records(folder: Path) -> list[RequestRecord]:
    try:
        return list(read_records(folder))
    except RecordError as error:
        raise ResultError(str(error)) from None


def _from_costs(
    case: Case, spec: LabSpec, runs: Sequence[RunResult], root: Path, failures: list[Failure]
) -> tuple[dict[str, float], Balance | None]:
    """What the simulator says of the case; nothing, and a failure, where it cannot be asked: what
    was measured stands without it."""
    path = costs_file(spec, root)
    if not path.exists():
        return {}, None
    costs, config = read(path, Costs), cluster_of(spec)
    guesses: dict[str, float] = {}
    balance: Balance | None = None
    try:
        balance = balance_of(case, config, costs, spec.snic_bytes_per_s)
        guesses = predictions(case, config, costs, runs, spec.cnic_bytes_per_s)
    except ValueError as error:  # UnsupportedModel is one
        failures.append(Failure(where=f"{case.name}: simulator", what=str(error)))
    return guesses, balance
