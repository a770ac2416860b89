"""What a simulated run was like."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dualpath.sim.steady import End
from dualpath.workload.measure import Spread

SPLIT: tuple[str, ...] = ("schedule", "allocate", "read", "prefill")
"""Parts of a TTFT, in order: until both engines are chosen; until buffers are free; until the hit
blocks are read; until the first token (waiting for a step included)."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Storage bytes read by every node in each window of time.

    Attributes:
        window_s: length of a window.
        read_bytes: per node name, bytes per window from the start of the run; a node's list ends
            with its last read.
    """

    window_s: float
    read_bytes: Mapping[str, Sequence[float]]

    def max_over_mean(self, until_s: float | None = None) -> list[float]:
        """Per window, the busiest node's bytes over the mean node's; windows without a read are
        left out. ``until_s`` leaves out the windows that end later: a run's tail."""
        series = list(self.read_bytes.values())
        count = max((len(one) for one in series), default=0)
        if until_s is not None:
            count = min(count, int(until_s / self.window_s))
        ratios: list[float] = []
        for at in range(count):
            loads = [one[at] if at < len(one) else 0.0 for one in series]
            if total := sum(loads):
                ratios.append(max(loads) * len(loads) / total)
        return ratios


@dataclass(frozen=True, slots=True)
class Steps:
    """Every prefill step of a lockstep group of more than one engine.

    Attributes:
        start_s, end_s: of the step.
        busiest_s, mean_s: attention time of the group's slowest engine, and of the mean one.
    """

    start_s: array[float]
    end_s: array[float]
    busiest_s: array[float]
    mean_s: array[float]

    def max_over_mean(self, until_s: float | None = None) -> float | None:
        """The slowest engine's attention time over the mean one's, all steps that start before
        ``until_s`` taken together; None without any."""
        busiest = mean = 0.0
        for start, high, middle in zip(self.start_s, self.busiest_s, self.mean_s, strict=True):
            if until_s is None or start < until_s:
                busiest += high
                mean += middle
        return busiest / mean if mean else None


@dataclass(frozen=True, slots=True)
class Samples:
    """One entry per measured request, in order of the first tokens; seconds.

    ``ttst_s`` and ``tpot_s`` are NaN where an answer has fewer than 2, or 3, tokens.
    """

    submit_s: array[float]
    ttft_s: array[float]
    ttst_s: array[float]
    tpot_s: array[float]
    split_s: Mapping[str, array[float]]


@dataclass(frozen=True, slots=True)
class SimResult:
    """Figures of one run. Times are simulated seconds unless they say otherwise.

    Attributes:
        name, mode, seed: what was run.
        agents, agents_done: how many arrived, how many finished all their rounds.
        requests, failed: rounds that ended; rounds that could never be served (their agents end).
        tokens_in, tokens_out, hit_tokens: of served rounds: prompt, answer, prompt tokens read.
        computed_tokens: prompt tokens computed.
        duration_s: first arrival to last end (offline: completion of the whole job).
        jct: of a finished agent, arrival to end of the last round, tool time included.
        ttft, ttst, tpot: of measured requests (online: see ``run.simulate``; else of all).
        ttft_split: its parts, by the names in ``SPLIT``.
        snic: storage bytes read by node; snic_written: written by node.
        path: hit bytes by the way they were read: pe, de; split requests count on both, and their
            bytes again under split.
        snic_max_over_mean: mean over windows of the busiest node's load over the mean node's;
            offline without the tail, which begins when half of the agents are over.
        attention_max_over_mean: see ``Steps``, first twentieth of the run.
        working_set_bytes, working_set_peak_bytes: KV of agents that are not over: mean over time
            (online: over the measured window) and peak.
        pool_hit_tokens: of ``hit_tokens``, those found in a node's DRAM pool (comparator).
        end: how a run until it is steady ended (``steady``); None for others.
        slo_met: mean TTFT and TPOT within the limits and nothing failed; None for offline runs.
        role_switches: second, node and role that it then has, of every change of a role.
        overloaded: an online run was given up, see ``run.simulate``.
        scheduler_cpu_s: real seconds inside the scheduler; scheduler_cores: those over the
            simulated seconds: the cores a live front of that cluster would need.
        events, wall_s: events handled and real seconds of the whole run.
        windows, steps, samples: the series behind the figures.
    """

    name: str
    mode: str
    seed: int
    agents: int
    agents_done: int
    requests: int
    failed: int
    tokens_in: int
    tokens_out: int
    hit_tokens: int
    computed_tokens: int
    duration_s: float
    jct: Spread | None
    ttft: Spread | None
    ttst: Spread | None
    tpot: Spread | None
    ttft_split: Mapping[str, Spread]
    snic: Mapping[str, float]
    snic_written: Mapping[str, float]
    path: Mapping[str, float]
    snic_max_over_mean: float | None
    attention_max_over_mean: float | None
    working_set_bytes: float
    working_set_peak_bytes: float
    pool_hit_tokens: int
    slo_met: bool | None
    end: End | None
    overloaded: bool
    role_switches: tuple[tuple[float, str, str], ...]
    scheduler_cpu_s: float
    events: int
    wall_s: float
    windows: Windows
    steps: Steps
    samples: Samples

    @property
    def scheduler_cores(self) -> float:
        """See ``scheduler_cpu_s``."""
        return self.scheduler_cpu_s / self.duration_s if self.duration_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything but the series; the keys that ``replay`` prints mean the same here."""

        def spread(value: Spread | None) -> dict[str, float] | None:
            return None if value is None else asdict(value)

        return {
            "name": self.name,
            "mode": self.mode,
            "seed": self.seed,
            "agents": self.agents,
            "agents_done": self.agents_done,
            "requests": self.requests,
            "failed": self.failed,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "hit_tokens": self.hit_tokens,
            "computed_tokens": self.computed_tokens,
            "pool_hit_tokens": self.pool_hit_tokens,
            "duration_s": self.duration_s,
            "jct_s": None if self.jct is None else self.jct.mean,
            "jct": spread(self.jct),
            "ttft_s": spread(self.ttft),
            "ttst_s": None if self.ttst is None else self.ttst.mean,
            "ttst": spread(self.ttst),
            "tpot_s": None if self.tpot is None else self.tpot.mean,
            "tpot": spread(self.tpot),
            "ttft_split_s": {name: spread(part) for name, part in self.ttft_split.items()},
            "snic": {name: round(value) for name, value in self.snic.items()},
            "snic_written": {name: round(value) for name, value in self.snic_written.items()},
            "path": {name: round(value) for name, value in self.path.items()},
            "snic_max_over_mean": self.snic_max_over_mean,
            "attention_max_over_mean": self.attention_max_over_mean,
            "working_set_bytes": round(self.working_set_bytes),
            "working_set_peak_bytes": round(self.working_set_peak_bytes),
            "slo_met": self.slo_met,
            "end": None if self.end is None else self.end.value,
            "overloaded": self.overloaded,
            "role_switches": self.role_switches,
            "scheduler_cpu_s": self.scheduler_cpu_s,
            "scheduler_cores": self.scheduler_cores,
            "events": self.events,
            "wall_s": self.wall_s,
        }
