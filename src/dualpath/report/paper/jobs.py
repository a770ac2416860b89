"""One simulation of the published evaluation, small enough to be sent to another process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from dualpath.sim.presets import preset
from dualpath.sim.result import SimResult
from dualpath.sim.run import simulate
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Round, Trajectory

ONLINE_S: Final = 3_000.0
"""A guess at how long an online run takes to become steady."""
CAPACITY_STEP: Final = 0.04
"""Relative width at which the search for the highest rate stops."""
_BALANCE_WINDOWS: Final = 400


@dataclass(frozen=True, slots=True)
class Job:
    """What to run.

    Attributes:
        preset: cluster and model.
        mode: see ``sim.MODES``.
        row: of Table 2.
        calibration: name.
        agents: offline; None for an online run.
        aps: online; None for an offline run, or for a search of the highest rate within the SLO.
        append_scale, gen_scale: factors on every round's tokens; a trajectory still ends at its
            row's context limit.
        seed: of arrivals.
    """

    preset: str
    mode: str
    row: str
    calibration: str
    agents: int | None = None
    aps: float | None = None
    append_scale: int = 1
    gen_scale: int = 1
    seed: int = 1

    @property
    def searches(self) -> bool:
        """Whether the job looks for the highest rate."""
        return self.agents is None and self.aps is None

    @property
    def label(self) -> str:
        """For progress and notes."""
        load = f"{self.agents} agents" if self.agents else f"{self.aps} APS"
        load = "capacity" if self.searches else load
        scales = [
            f"{name} x {factor}"
            for name, factor in (("append", self.append_scale), ("gen", self.gen_scale))
            if factor != 1
        ]
        return " ".join([self.preset, self.mode, self.row.upper(), load, *scales, self.calibration])

    @property
    def cost(self) -> float:
        """A guess at rounds to simulate, to start the longest first."""
        turns = ROWS[self.row].paper[0]
        nodes = sum(int(part) for part in _nodes(self.preset))
        if self.agents is not None:
            return self.agents * turns
        rounds_per_aps = ONLINE_S * turns
        return 6 * 0.1 * nodes * rounds_per_aps if self.aps is None else self.aps * rounds_per_aps


def run_job(job: Job) -> dict[str, Any]:
    """Run it: ``SimResult.to_json`` with the series that figures need, or what a search found.

    Raises:
        ValueError: the job names something unknown.
    """
    if job.searches:
        return _search(job)
    spec = preset(job.preset, job.mode, job.calibration)
    result = simulate(
        spec,
        trajectories(job),
        agents=job.agents,
        aps=job.aps,
        seed=job.seed,
        until_steady=job.aps is not None,
    )
    return {**result.to_json(), "series": _series(result)}


def trajectories(job: Job) -> Iterator[Trajectory]:
    """The row's 500 trajectories, scaled.

    Every round's tokens are scaled; the trajectory ends before the round that would cross the
    row's context limit, as the unscaled ones do (section 7.3).
    """
    row = ROWS[job.row]
    for trajectory in synthesise(row):
        if job.append_scale == job.gen_scale == 1:
            yield trajectory
            continue
        rounds: list[Round] = []
        total = 0
        for item in trajectory.rounds:
            append, gen = item.append_tokens * job.append_scale, item.gen_tokens * job.gen_scale
            total += append + gen
            if total > row.max_tokens and rounds:
                break
            rounds.append(Round(append, gen, item.tool_latency_s))
        yield replace(trajectory, rounds=tuple(rounds))


def _search(job: Job) -> dict[str, Any]:
    """The highest rate that keeps the SLO, between rates that differ by ``CAPACITY_STEP``."""
    nodes = sum(int(part) for part in _nodes(job.preset))
    low, high = 0.0, 0.05 * nodes
    tried: dict[str, bool] = {}

    def holds(aps: float) -> bool:
        met = bool(run_job(replace(job, aps=aps))["slo_met"])
        tried[f"{aps:.4g}"] = met
        return met

    while holds(high):
        low, high = high, high * 1.6
    if not low:
        while not holds(low := high / 1.6):
            high = low
            if high < 1e-3 * nodes:
                return {"capacity_aps": 0.0, "tried": tried}
    while high / low > 1 + CAPACITY_STEP:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return {"capacity_aps": low, "tried": tried}


def _series(result: SimResult) -> dict[str, Any]:
    """Balance over time, thinned to what a plot can show."""
    balance = result.windows.max_over_mean(result.duration_s * 0.9)
    every = max(1, len(balance) // _BALANCE_WINDOWS)
    parts = [sum(part) / len(part) for part in _chunks(balance, every)]
    steps = result.steps
    limit_s = result.duration_s * 0.05
    attention = [
        (start, high / mean)
        for start, high, mean in zip(steps.start_s, steps.busiest_s, steps.mean_s, strict=True)
        if mean and start < limit_s
    ]
    thin = max(1, len(attention) // _BALANCE_WINDOWS)
    groups = list(_chunks(attention, thin))
    return {
        "snic_window_s": result.windows.window_s * every,
        "snic_max_over_mean": parts,
        "attention_start_s": [group[0][0] for group in groups],
        "attention_max_over_mean": [sum(pair[1] for pair in g) / len(g) for g in groups],
    }


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    for at in range(0, len(values), size):
        yield values[at : at + size]


def _nodes(name: str) -> tuple[str, str]:
    """``("2", "4")`` of ``ds-660b-2p4d``."""
    prefill, _, decode = name.rpartition("-")[2].removesuffix("d").partition("p")
    return prefill, decode
