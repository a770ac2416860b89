"""Run the published evaluation on the simulator and hold it against the paper."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import dualpath
from dualpath.report.paper.experiments import EXPERIMENTS, Experiment, Found
from dualpath.report.paper.jobs import Job, run_job
from dualpath.report.paper.published import Kind, Published

JobDone = Callable[[Job, int, int], None]
"""Called with a job that is over, how many are, and how many there will be."""
_CODE: Final = (
    "blocks", "model", "scheduler", "sim", "workload", "report/paper/jobs.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One published number beside ours.

    Attributes:
        name, paper, unit, where: see ``Published``.
        ours: our value.
        error: signed: relative for ``rel``, in the row's unit for ``abs`` and ``upper`` (against
            the bound), ours minus 1 for ``trend``.
        kind, tolerance: how it is judged.
        met: whether it is within tolerance.
        note: what a reader must know.
    """

    name: str
    paper: float | None
    ours: float
    error: float
    kind: Kind
    tolerance: float
    met: bool
    unit: str
    where: str
    note: str

    def to_json(self) -> dict[str, Any]:
        """Plain objects."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(frozen=True, slots=True)
class Reproduction:
    """All rows asked for under one calibration, and what the plots draw."""

    calibration: str
    rows: tuple[Row, ...]
    series: dict[str, Any]

    @property
    def met(self) -> int:
        """How many rows are within tolerance."""
        return sum(row.met for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """``{"calibration", "rows": [...]}``; the series are kept apart, they are long."""
        return {"calibration": self.calibration, "rows": [row.to_json() for row in self.rows]}


def judge(published: Published, ours: float, note: str = "") -> Row:
    """Hold one value against the paper's."""
    tolerance = published.tolerance
    if published.kind is Kind.TREND:
        error, met = ours - 1.0, ours == 1.0
    elif published.kind is Kind.UPPER:
        error = ours - tolerance
        met = error <= 0
    else:
        assert published.paper is not None
        error = ours - published.paper
        if published.kind is Kind.REL:
            error /= published.paper
        met = abs(error) <= tolerance
    return Row(
        name=published.name,
        paper=published.paper,
        ours=ours,
        error=error,
        kind=published.kind,
        tolerance=tolerance,
        met=met,
        unit=published.unit,
        where=published.where,
        note="; ".join(text for text in (note, published.note) if text),
    )


def reproduce(
    wanted: Iterable[Published],
    calibration: str,
    *,
    workers: int = 1,
    cache: Path | None = None,
    progress: JobDone | None = None,
) -> Reproduction:
    """Run what the wanted rows need.

    Args:
        wanted: rows.
        calibration: a name of ``sim.CALIBRATIONS``.
        workers: processes that simulate at once.
        cache: file to which every result is appended and from which those are taken that the same
            code has already computed; None keeps nothing.
        progress: see ``JobDone``.

    Raises:
        OSError: the cache cannot be written.
        ValueError: the calibration is unknown.
    """
    rows = tuple(wanted)
    groups = {row.group for row in rows}
    running: dict[str, Experiment] = {}
    jobs: dict[str, tuple[Job, ...]] = {}
    for name, (make, answers) in EXPERIMENTS.items():
        if groups & set(answers):
            running[name] = make(calibration)
            jobs[name] = tuple(next(running[name]))
    every = list(dict.fromkeys(job for some in jobs.values() for job in some))
    results = _run(every, workers, _Cache(cache), progress)
    found = Found()
    for name, experiment in running.items():
        one = _finish(experiment, {job: results[job] for job in jobs[name]})
        found.values |= one.values
        found.notes |= one.notes
        found.series |= one.series
    return Reproduction(
        calibration,
        tuple(judge(row, found.values[row.name], found.notes.get(row.name, "")) for row in rows),
        found.series,
    )


def _finish(experiment: Experiment, results: dict[Job, dict[str, Any]]) -> Found:
    try:
        experiment.send(results)
    except StopIteration as end:
        assert isinstance(end.value, Found)
        return end.value
    raise RuntimeError("an experiment asked for jobs twice")


def _run(
    jobs: list[Job], workers: int, cache: _Cache, progress: JobDone | None
) -> dict[Job, dict[str, Any]]:
    """Longest first, so that no worker is left with a long job at the end."""
    results = {job: known for job in jobs if (known := cache.get(job)) is not None}
    if progress is not None:
        for done, job in enumerate(results, 1):
            progress(job, done, len(jobs))
    missing = sorted((job for job in jobs if job not in results), key=lambda job: -job.cost)
    if not missing:
        return results
    with ProcessPoolExecutor(max_workers=workers) as pool:
        futures = {pool.submit(run_job, job): job for job in missing}
        try:
            for future in as_completed(futures):
                job = futures[future]
                results[job] = future.result()
                cache.put(job, results[job])
                if progress is not None:
                    progress(job, len(results), len(jobs))
        except BaseException:  # an interrupt or a failed job: nothing queued may start any more
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


class _Cache:
    """Results by job, valid for the code that computed them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        self._code = _fingerprint() if path is not None else ""
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry["code"] == self._code:
                    self._known[entry["job"]] = entry["result"]

    def get(self, job: Job) -> dict[str, Any] | None:
        return self._known.get(repr(job))

    def put(self, job: Job, result: dict[str, Any]) -> None:
        if self._path is not None:
            entry = {"code": self._code, "job": repr(job), "result": result}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _fingerprint() -> str:
    """Of all source text a result depends on."""
    root = Path(dualpath.__file__).parent
    digest = hashlib.sha256()
    for name in _CODE:
        place = root / name
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
