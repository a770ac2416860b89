"""Runs an experiment: one cluster after the other, every run that is not there yet.

DIR/experiment.json  what DIR is of; another experiment does not get in
DIR/summary.json     written anew after every run

What fails is told and put into the summary, and the rest is run: hours of measurements do not end
with one of them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from dualpath.config import ClusterConfig, Mode
from dualpath.lab.cluster import Lab, lab_cluster
from dualpath.lab.describe import cluster_of
from dualpath.lab.experiments import Case, Experiment
from dualpath.lab.gathering import REFERENCE, costs_file, gathered, places_of
from dualpath.lab.measuring import measure, probe
from dualpath.lab.network import LabError
from dualpath.lab.plain import plain_vllm
from dualpath.lab.replaying import Replaying, RunFailed, RunPlace, replayed
from dualpath.lab.spec import LabSpec
from dualpath.report.lab.results import (
    RUN,
    SUMMARY,
    Failure,
    ResultError,
    RunResult,
    Summary,
    read,
    write,
)
from dualpath.serve.ports import NoFreePort
from dualpath.serve.supervise import Listener, StartFailed
from dualpath.workload import ReplayOptions, RequestFailed

EXPERIMENT: Final = "experiment.json"
_RUN_DIR: Final = "run"
FAILURES: Final = (LabError, StartFailed, RunFailed, RequestFailed, NoFreePort)
"""What ends a run or a cluster and not the experiment."""

Starting = Callable[[str], AbstractContextManager[tuple[Listener, Callable[[], None]]]]
C = TypeVar("C")


def _unheard(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True)
class Show:
    """Tells what goes on: engines that start, agents under way, what failed."""

    starting: Starting
    replaying: Replaying
    say: Callable[[str], None] = _unheard


@dataclass(slots=True)
class Book:
    """What is to be said of an experiment beside its runs. Whatever is added is told, and the
    summary written anew.

    Attributes:
        root: the experiment's folder.
        summarise: makes the summary of what is there.
        say: tells a person.
    """

    root: Path
    summarise: Callable[[Sequence[Failure], Sequence[str]], Summary]
    say: Callable[[str], None]
    _failures: list[Failure] = field(default_factory=list)
    _skipped: list[str] = field(default_factory=list)

    def failed(self, where: str, error: Exception) -> None:
        """A run or another step did."""
        text = " ".join(str(error).split())
        failure = Failure(where=where, what=text.removeprefix(f"{where}: "))
        self._failures.append(failure)
        self.say(f"failed: {failure}")
        self.save()

    def skipped(self, where: str, why: str) -> None:
        """A run is left out on purpose."""
        self._skipped.append(f"{where}: {why}")
        self.say(f"left out: {where}: {why}")
        self.save()

    def save(self) -> Summary:
        """The summary of what is there now.

        Raises:
            ResultError: it cannot be made or written.
        """
        summary = self.summarise(self._failures, self._skipped)
        write(self.root / SUMMARY, summary)
        return summary


@dataclass(frozen=True, slots=True)
class Step(Generic[C]):
    """Something to do on a cluster, called ``title``."""

    title: str
    do: Callable[[C], Awaitable[object]]


async def run_experiment(
    experiment: Experiment, spec: LabSpec, root: Path, show: Show, *, until_slo: bool = False
) -> Summary:
    """Run what is missing in ``root`` and write its summary.

    Args:
        spec: model and rates; numbers of nodes are the cases' own.
        until_slo: leave a variant out at rates of arrivals above one at which it missed the limits
            on TTFT or TPOT.

    Raises:
        ResultError: ``root`` holds another experiment, or cannot be used.
        ConfigError: no lab can be made here.
        NotRemoved: a lab is left over; what was run stays.
        NoEngine: there is no vLLM.
    """
    claim_folder(experiment, spec, root)
    book = Book(root, partial(gathered, experiment, spec, root), show.say)
    for (prefill, decode), group in groupby(
        experiment.cases, lambda one: (one.prefill, one.decode)
    ):
        cases = list(group)
        wanted = dataclasses.replace(spec, prefill=prefill, decode=decode, mode=Mode.DUALPATH)
        await _measure(cases, wanted, book, show, until_slo)
        await _reference(cases, cluster_of(wanted), book, show)
    return book.save()


def claim_folder(experiment: Experiment, spec: LabSpec, root: Path) -> None:
    """Only one experiment lives in a folder; more repeats of it may come in later.

    Raises:
        ResultError: another one does, or the folder cannot be used.
    """
    once = dataclasses.asdict(experiment.with_repeats(1))
    text = msgspec.json.encode({"experiment": once, "lab": dataclasses.asdict(spec)})
    described: dict[str, Any] = msgspec.json.decode(text)  # as it will be read
    path = root / EXPERIMENT
    if not path.exists():
        write(path, described)
    elif read(path, dict[str, Any]) != described:
        raise ResultError(f"{path}: is of another experiment or lab; name another folder")


async def do_all(
    steps: Iterable[Step[C]],
    title: str,
    cluster: Callable[[], AbstractAsyncContextManager[C]],
    book: Book,
) -> None:
    """Do every step on a cluster. One that fails is put into the book, and the next one gets a new
    cluster: what the failed one left under way must not meet it. A cluster that does not start
    ends this, because the next one would not either."""
    left = deque(steps)
    while left:
        started = False
        try:
            async with cluster() as running:
                started = True
                while left:
                    step = left.popleft()
                    try:
                        await step.do(running)
                    except FAILURES as error:
                        book.failed(step.title, error)
                        break
                    book.save()
        except FAILURES as error:
            book.failed(title, error)
            if not started:
                return


def missing(cases: Iterable[Case], root: Path) -> list[RunPlace]:
    """Runs that are not there, in the order in which they are run."""
    places = (place for case in cases for place in places_of(case, root))
    return [place for place in places if not (place.folder / RUN).exists()]


async def _measure(
    cases: Sequence[Case], spec: LabSpec, book: Book, show: Show, until_slo: bool
) -> None:
    root, costs_path = book.root, costs_file(spec, book.root)
    name = f"{spec.prefill}p{spec.decode}d"

    def step(place: RunPlace) -> Step[Lab]:
        async def run(lab: Lab) -> None:
            if until_slo and (why := _over_slo(place, cases)):
                book.skipped(place.title, why)
            else:
                await measure(lab, place, show.replaying)

        return Step(place.title, run)

    async def costs(lab: Lab) -> None:
        write(costs_path, await probe(lab, cases[0], root / "probes" / name, show.replaying))

    steps = [step(place) for place in missing(cases, root)]
    if not costs_path.exists():
        steps.append(Step(f"{name}: probes for the simulator", costs))
    title = f"{spec.prefill} prefill and {spec.decode} decode nodes"

    @asynccontextmanager
    async def cluster() -> AsyncIterator[Lab]:
        with show.starting(title) as (listen, settled):
            async with lab_cluster(spec, root / _RUN_DIR / name, listen) as lab:
                settled()
                yield lab

    await do_all(steps, title, cluster, book)


def _over_slo(place: RunPlace, cases: Sequence[Case]) -> str:
    """At which lower rate of arrivals the variant missed the limits, in words; empty when at
    none."""
    aps = place.case.aps
    for case in cases:
        if aps is None or case.aps is None or case.aps >= aps:
            continue
        path = dataclasses.replace(place, case=case).folder / RUN
        if path.exists() and not read(path, RunResult).slo_met:
            return f"{place.variant} missed the limits on TTFT or TPOT at {case.aps:g} agents/s"
    return ""


async def _reference(cases: Sequence[Case], config: ClusterConfig, book: Book, show: Show) -> None:
    """The plain vLLM's answers to every case that has runs."""
    root = book.root

    def step(case: Case) -> Step[str]:
        title = f"{case.name} plain vLLM"

        async def run(url: str) -> None:
            # Under its name only when it is whole.
            part = root / case.name / f"{REFERENCE}.part"
            shutil.rmtree(part, ignore_errors=True)
            options = ReplayOptions(url, out=part)
            await replayed(case.shape.measured(), case.seed, options, title, show.replaying)
            part.rename(root / case.name / REFERENCE)

        return Step(title, run)

    @asynccontextmanager
    async def cluster() -> AsyncIterator[str]:
        with show.starting("plain vLLM") as (listen, settled):
            async with plain_vllm(config, root / _RUN_DIR / "plain.log", listen) as url:
                settled()
                yield url

    wanted = [
        case
        for case in cases
        if not (root / case.name / REFERENCE).exists() and _has_runs(case, root)
    ]
    await do_all([step(case) for case in wanted], "plain vLLM", cluster, book)


def _has_runs(case: Case, root: Path) -> bool:
    return any((place.folder / RUN).exists() for place in places_of(case, root))
