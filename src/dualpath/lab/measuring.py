"""One measured run on a lab: fill the store, forget all caches, switch, replay, count."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dualpath.config import Mode
from dualpath.lab.agreement import Agreement, Snapshot, agreement, snapshot
from dualpath.lab.cluster import Lab
from dualpath.lab.costs import Costs, Probes, costs_from
from dualpath.lab.experiments import Case, Shape
from dualpath.lab.network import LabError
from dualpath.lab.replaying import (
    Replaying,
    RunFailed,
    RunPlace,
    not_ended,
    replayed,
    replayed_for,
)
from dualpath.lab.sampling import carried, sampled
from dualpath.lab.summing import readers
from dualpath.report.lab.bounds import Sample, busy, max_over_mean
from dualpath.report.lab.results import RUN, SAMPLES, RunResult, write, write_samples
from dualpath.workload import ReplayOptions, ReplayResult, RequestRecord
from dualpath.workload.client import Endpoint

FILLING_MODE = Mode.DUALPATH
"""The warm-up's, for all variants: what is stored is the same in every mode, and oracle stores
nothing."""
_METRICS = "/metrics"
_METRICS_S = 10.0
_DRAIN_S = 120.0
_DROPPED_S = 420.0
"""Where requests were dropped: reads that queue at a slow NIC (``timeouts.storage`` of a lab is 300
seconds) go on without them."""
_PHASE = "dualpath_phase_seconds"
_NO_SUCH_BYTES = 1e3
"""Error of bytes that only one side knows."""


async def measure(lab: Lab, place: RunPlace, replaying: Replaying) -> RunResult:
    """Run it and write its files.

    Where agents arrive one by one, a run whose agents did not all finish is a result, too: they
    came faster than they could be served.

    Raises:
        RunFailed: see there.
        LabError: the lab failed.
        RequestFailed: the front could not be used.
        ResultError: a file could not be written.
    """
    case, variant = place.case, place.case.variant(place.variant)
    shutil.rmtree(place.folder, ignore_errors=True)  # what an interrupted run has left
    await _fill(lab, case.shape, case.seed, place.title, replaying)
    await lab.set_mode(variant.mode, variant.policy)
    options = ReplayOptions(
        url=lab.front_url, api_key=lab.admin_key, seed=case.seed, aps=case.aps, out=place.folder
    )
    before = await _Counted.of(lab)
    replays = replayed if case.aps is None else replayed_for
    async with sampled(lab) as samples:
        result = await replays(
            case.shape.measured(), case.seed, options, place.title, replaying, case.limit_s
        )
    await lab.drained(_DROPPED_S if not_ended(result, case.limit_s) else _DRAIN_S)
    after = await _Counted.of(lab)
    token_bytes = (await lab.state())["kv"]["token_bytes"]
    run = _result(place, lab, result, samples, before, after, token_bytes)
    write_samples(place.folder / SAMPLES, samples)
    write(place.folder / RUN, run)
    return run


async def probe(lab: Lab, case: Case, folder: Path, replaying: Replaying) -> Costs:
    """What the lab's engines need for runs like the case's; see ``costs``.

    Args:
        folder: for the probes' requests.

    Raises:
        RunFailed: see there, or the probes were too short.
        LabError: the lab failed.
        RequestFailed: the front could not be used.
    """
    probes = Probes.of(case.shape)
    await _fill(lab, case.shape, case.seed, "probes", replaying)
    await lab.set_mode(Mode.ORACLE)
    records: list[Sequence[RequestRecord]] = []
    shutil.rmtree(folder, ignore_errors=True)
    for name, shape in (("one", probes.one), ("longer", probes.longer), ("all", probes.all)):
        options = ReplayOptions(url=lab.front_url, api_key=lab.admin_key, out=folder / name)
        result = await replayed(shape.measured(), case.seed, options, "probes", replaying)
        records.append(result.records)
    try:
        one, longer, everybody = records
        return costs_from(probes, one, longer, everybody, case.decode)
    except ValueError as error:
        raise RunFailed(f"probes: {error}") from None


async def _fill(lab: Lab, shape: Shape, seed: int, title: str, replaying: Replaying) -> None:
    await lab.set_mode(FILLING_MODE)
    await lab.fresh_store()
    options = ReplayOptions(url=lab.front_url, api_key=lab.admin_key)
    await replayed(shape.warm_up(), seed, options, f"{title}: contexts", replaying)
    await lab.drained()
    await lab.drop_caches()


@dataclass(frozen=True, slots=True)
class _Counted:
    """Totals at one moment."""

    phases_s: dict[str, tuple[float, float]]
    cpu_s: dict[str, float]
    counted: Snapshot

    @classmethod
    async def of(cls, lab: Lab) -> _Counted:
        """Raises LabError or RequestFailed: the front does not tell."""
        async with Endpoint(lab.front_url, lab.admin_key) as endpoint:
            status, text = await endpoint.get(_METRICS, _METRICS_S)
        if status != 200:
            raise LabError(f"{lab.front_url}{_METRICS} answers HTTP {status}: {text[:200]!r}")
        return cls(_phases(text.decode()), lab.network.cpu_seconds(), await snapshot(lab))


def _phases(text: str) -> dict[str, tuple[float, float]]:
    """Sum of seconds and number of requests, by phase."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name == _PHASE:
            for sample in family.samples:
                kind = sample.name.removeprefix(f"{_PHASE}_")
                found.setdefault(sample.labels["phase"], {})[kind] = sample.value
    return {name: (values["sum"], values["count"]) for name, values in found.items()}


def _result(
    place: RunPlace,
    lab: Lab,
    result: ReplayResult,
    samples: list[Sample],
    before: _Counted,
    after: _Counted,
    token_bytes: int,
) -> RunResult:
    case, variant = place.case, place.case.variant(place.variant)
    hit_tokens = case.shape.hit_tokens(lab.config.engine.block_tokens)
    hit_bytes = hit_tokens * token_bytes / (case.shape.agents * case.shape.turns)
    found = agreement(before.counted, after.counted)
    return RunResult(
        case=case.name,
        variant=variant.name,
        repeat=place.repeat,
        mode=variant.mode.value,
        policy=variant.policy,
        figures=msgspec.to_builtins(result.figures.to_json()),
        nics=carried(samples),
        snic_metric_bytes=result.figures.snic or {},
        busy=busy(samples, readers(case, variant.mode)),
        snic_max_over_mean=max_over_mean(
            samples, _first_end_s(result), lab.spec.snic_bytes_per_s, hit_bytes
        ),
        bytes_error=_error(found),
        loopback_bytes=max(found.loopback_bytes.values()),
        ttft_split_s=_means(before.phases_s, after.phases_s),
        cpu_s={name: after.cpu_s[name] - before.cpu_s.get(name, 0.0) for name in after.cpu_s},
        ended=not_ended(result, case.limit_s),
    )


def _error(found: Agreement) -> float | None:
    errors = [abs(line.error) for line in found.lines if line.error is not None]
    return min(max(errors), _NO_SUCH_BYTES) if errors else None


def _first_end_s(result: ReplayResult) -> float:
    """When the first agent was over; 0 when none was answered."""
    ends: dict[int, float] = {}
    for record in result.records:
        ends[record.agent] = max(
            ends.get(record.agent, 0.0), record.start_s + (record.total_s or 0.0)
        )
    return min(ends.values(), default=0.0)


def _means(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
) -> dict[str, float]:
    means = {}
    for name, (seconds, count) in after.items():
        seconds_before, count_before = before.get(name, (0.0, 0.0))
        if count > count_before:
            means[name] = (seconds - seconds_before) / (count - count_before)
    return means
