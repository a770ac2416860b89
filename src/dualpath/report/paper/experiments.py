"""Which simulations a group of rows needs, and how its values are taken from them.

Each function of ``EXPERIMENTS`` is a generator of one group: it yields the jobs it needs, is sent
their results, and returns the group's values and plots. So what is run and what is read from it
stand in one place, and no value can come from a job that was not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from dualpath.model import preset_cost
from dualpath.plan.ratio import closed_form
from dualpath.plan.traffic import Node
from dualpath.report.paper.jobs import Job
from dualpath.sim.presets import preset
from dualpath.workload.stats import trace_stats
from dualpath.workload.synth import ROWS, synthesise

Results = Mapping[Job, dict[str, Any]]

LENGTHS: Final = ("32k", "48k", "64k")
OFFLINE_AGENTS: Final[dict[str, tuple[int, ...]]] = {
    "ds-660b-2p4d": (512, 1024, 2048),
    "ds-27b-1p1d": (512, 1024, 2048),
    "qwen-32b-1p2d": (512, 1024),
}
"""Agents of the offline figure."""
PD_RATIOS: Final = ("ds-27b-1p1d", "ds-27b-2p1d", "ds-27b-1p2d")
ONLINE_RATES: Final[dict[str, tuple[float, ...]]] = {
    "ds-660b-2p4d": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.45),
    "ds-27b-1p1d": (0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
}
SCALES: Final = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Table3:
    """The rows of Table 2 that the two halves of Table 3 are read as; it does not say."""

    offline: str
    online: str


TABLE3: Final = {
    "C1": Table3("64k", "64k"),
    "C2": Table3("48k", "48k"),
    "C3": Table3("48k", "48k"),
}
"""By calibration."""
TRAJECTORY_MODEL_CONTEXTS: Final = {"16k": 16 * 1024, "64k": 64 * 1024}
TABLE1_APPEND: Final = 429


@dataclass(slots=True)
class Found:
    """What an experiment gives.

    Attributes:
        values: by row name.
        notes: by row name: what a reader must know beside ours.
        series: what its plots draw, plain objects by plot name.
    """

    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)


Experiment = Generator[Iterable[Job], Results, Found]


def table1(calibration: str) -> Experiment:
    """GB of KV a PFLOP of prefill needs, by arithmetic."""
    yield ()
    found = Found()
    for model in ("qwen2.5-32b", "gpt-oss-120b", "qwen3-235b", "ds-v3.2", "ds-v3"):
        cost = preset_cost(model)
        for name, context in TRAJECTORY_MODEL_CONTEXTS.items():
            found.values[f"table1.{model}.{name}"] = cost.table1_gb_per_pflop(
                context, TABLE1_APPEND
            )
    return found


def table2(calibration: str) -> Experiment:
    """The 500 frozen trajectories of each row, macro reading."""
    yield ()
    found = Found()
    for row in ROWS.values():
        stats = trace_stats(synthesise(row))
        for column, value in (
            ("turns", stats.turns),
            ("append", stats.macro.append),
            ("gen", stats.macro.gen),
            ("total", stats.total),
            ("context", stats.macro.context),
        ):
            found.values[f"table2.{row.name}.{column}"] = value
        for column, request in (("append", stats.request.append), ("gen", stats.request.gen)):
            found.notes[f"table2.{row.name}.{column}"] = f"per request: {request:.0f}"
    return found


def pd_range(calibration: str) -> Experiment:
    """Section 4.2's example."""
    yield ()
    node = Node(gpus=8, cnic_gbs=Fraction(50), snic_gbs=Fraction(50), memory_gbs=Fraction(500))
    limits = closed_form(node, node)
    return Found({"pd_min": float(limits.least), "pd_max": float(limits.most)})


def ablation(calibration: str) -> Experiment:
    """Basic, then layerwise prefill, the second path, scheduling: one after the other."""
    steps = {
        "layerwise": "layerwise", "dualpath": "alternating", "scheduling": "dualpath",
    }  # fmt: skip
    jobs = {
        (mode, agents): Job("ds-660b-2p4d", mode, "64k", calibration, agents=agents)
        for mode in ("basic", *steps.values())
        for agents in (1024, 2048)
    }
    results = yield jobs.values()
    found = Found()
    bars: dict[str, list[float]] = {}
    for mode in ("basic", *steps.values()):
        bars[mode] = [_jct(results[jobs[mode, agents]]) for agents in (1024, 2048)]
    for name, mode in steps.items():
        relative = [ours / base for ours, base in zip(bars[mode], bars["basic"], strict=True)]
        found.values[f"ablation.{name}"] = 100 * (_mean(relative) - 1)
    found.series["ablation"] = {"agents": [1024, 2048], "jct_s": bars}
    return found


def offline(calibration: str) -> Experiment:
    """JCT by agents and length; the best speed-ups; how far from Oracle; Qwen."""
    modes = ("basic", "dualpath", "oracle", "comparator")
    jobs = {
        (name, mode, row, agents): Job(name, mode, row, calibration, agents=agents)
        for name, counts in OFFLINE_AGENTS.items()
        for mode in modes
        if not (mode == "comparator" and name == "ds-27b-1p1d")  # the paper has none either
        for row in LENGTHS
        for agents in counts
    }
    results = yield jobs.values()
    found = Found()
    jct = {key: _jct(results[job]) for key, job in jobs.items()}
    speedups: dict[str, dict[str, float]] = {}
    to_oracle: dict[str, list[float]] = {}
    for name, counts in OFFLINE_AGENTS.items():
        points = [(row, agents) for row in LENGTHS for agents in counts]
        speedups[name] = {
            f"{row} {agents}": jct[name, "basic", row, agents] / jct[name, "dualpath", row, agents]
            for row, agents in points
        }
        to_oracle[name] = [
            jct[name, "dualpath", row, agents] / jct[name, "oracle", row, agents]
            for row, agents in points
        ]
    for model, name in (("660b", "ds-660b-2p4d"), ("27b", "ds-27b-1p1d")):
        best = max(speedups[name], key=speedups[name].__getitem__)
        found.values[f"speedup.{model}.max"] = speedups[name][best]
        found.notes[f"speedup.{model}.max"] = f"at {best} agents"
    found.values["oracle.660b"] = _mean(to_oracle["ds-660b-2p4d"])
    slower = to_oracle["ds-27b-1p1d"]
    found.values["oracle.27b"] = float(1.09 <= _mean(slower) <= 1.85)
    found.notes["oracle.27b"] = (
        f"ours {_mean(slower):.2f}, {min(slower):.2f} .. {max(slower):.2f} over the points"
    )
    qwen = list(speedups["qwen-32b-1p2d"].values())
    found.values["qwen.trend"] = float(min(qwen) > 1)
    found.notes["qwen.trend"] = f"speed-ups {min(qwen):.2f} .. {max(qwen):.2f}"
    found.series["offline"] = {
        name: {
            row: {
                "agents": list(counts),
                "jct_s": {
                    mode: [jct[name, mode, row, agents] for agents in counts]
                    for mode in modes
                    if (name, mode, row, counts[0]) in jct
                },
            }
            for row in LENGTHS
        }
        for name, counts in OFFLINE_AGENTS.items()
    }
    return found


def pd_ratios(calibration: str) -> Experiment:
    """27B on 1P1D, 2P1D and 1P2D, at 64K as the ablation."""
    counts = OFFLINE_AGENTS["ds-27b-1p1d"]
    jobs = {
        (name, mode, agents): Job(name, mode, "64k", calibration, agents=agents)
        for name in PD_RATIOS
        for mode in ("basic", "dualpath")
        for agents in counts
    }
    results = yield jobs.values()
    found = Found()
    jct = {key: _jct(results[job]) for key, job in jobs.items()}
    speedups = [
        jct[name, "basic", agents] / jct[name, "dualpath", agents]
        for name in PD_RATIOS
        for agents in counts
    ]
    found.values["pd.mean"], found.values["pd.max"] = _mean(speedups), max(speedups)
    for index, (one, other) in enumerate(
        (
            (("ds-27b-1p1d", "basic"), ("ds-27b-1p2d", "basic")),
            (("ds-27b-1p1d", "dualpath"), ("ds-27b-2p1d", "basic")),
            (("ds-27b-2p1d", "dualpath"), ("ds-27b-1p2d", "dualpath")),
        ),
        1,
    ):
        found.values[f"pd.pair{index}"] = _mean(
            [jct[*one, agents] / jct[*other, agents] for agents in counts]
        )
    found.series["pd"] = {
        "64k": {
            "agents": list(counts),
            "jct_s": {
                f"{name.rpartition('-')[2].upper()} {mode}": [
                    jct[name, mode, agents] for agents in counts
                ]
                for name in PD_RATIOS
                for mode in ("basic", "dualpath")
            },
        }
    }
    return found


def scale(calibration: str) -> Experiment:
    """Table 3 offline, and what the scheduler costs at 1,152 GPUs."""
    row = TABLE3[calibration].offline
    small = Job("ds-660b-2p4d", "dualpath", row, calibration, agents=2_000)
    large = Job("ds-660b-48p96d", "dualpath", row, calibration, agents=48_000)
    results = yield (small, large)
    found = Found()
    found.values["scale.jct_small"] = _jct(results[small])
    found.values["scale.jct_large"] = _jct(results[large])
    found.values["scale.ratio"] = _jct(results[large]) / _jct(results[small])
    for size in ("small", "large"):
        found.notes[f"scale.jct_{size}"] = f"read as {row.upper()}"
    found.values["scheduler.cores"] = results[large]["scheduler_cores"]
    found.notes["scheduler.cores"] = (
        f"{results[large]['scheduler_cpu_s']:.0f} s of one core for "
        f"{results[large]['requests']:,} rounds"
    )
    return found


def online(calibration: str) -> Experiment:
    """Table 3 online."""
    row = TABLE3[calibration].online
    jobs = {
        "small": Job("ds-660b-2p4d", "dualpath", row, calibration, aps=0.4),
        "large": Job("ds-660b-44p88d", "dualpath", row, calibration, aps=8.8),
    }
    results = yield jobs.values()
    found = Found()
    for size, job in jobs.items():
        result = results[job]
        for figure in ("ttft", "ttst", "tpot"):
            mean = _mean_s(result, figure)
            found.values[f"online.{figure}.{size}"] = mean
            found.notes[f"online.{figure}.{size}"] = f"read as {row.upper()}"
    return found


def balance(calibration: str) -> Experiment:
    """Storage NICs and attention, with the scheduler and with everything in turn."""
    jobs = {
        "round robin": Job("ds-27b-1p2d", "alternating", "48k", calibration, agents=1024),
        "scheduler": Job("ds-27b-1p2d", "dualpath", "48k", calibration, agents=1024),
    }
    results = yield jobs.values()
    found = Found()
    turn, ours = results[jobs["round robin"]], results[jobs["scheduler"]]
    found.values["snic.round_robin"] = turn["snic_max_over_mean"]
    found.values["snic.scheduler"] = ours["snic_max_over_mean"]
    found.values["attention.maxavg"] = ours["attention_max_over_mean"]
    found.notes["attention.maxavg"] = f"round robin {turn['attention_max_over_mean']:.2f}"
    found.series["balance"] = {name: results[job]["series"] for name, job in jobs.items()}
    return found


def capacity(calibration: str) -> Experiment:
    """Highest rates within the SLO."""
    row = TABLE3[calibration].online
    jobs = {
        (model, mode): Job(name, mode, row, calibration)
        for model, name in (("660b", "ds-660b-2p4d"), ("27b", "ds-27b-1p1d"))
        for mode in ("basic", "dualpath")
    }
    results = yield jobs.values()
    found = Found()
    for model in ("660b", "27b"):
        basic = results[jobs[model, "basic"]]["capacity_aps"]
        ours = results[jobs[model, "dualpath"]]["capacity_aps"]
        found.values[f"capacity.{model}"] = ours / basic if basic else float("inf")
        found.notes[f"capacity.{model}"] = (
            f"{ours:.3f} against {basic:.3f} APS, read as {row.upper()}"
        )
    found.values["capacity.mean"] = _mean(
        [found.values["capacity.660b"], found.values["capacity.27b"]]
    )
    return found


def rates(calibration: str) -> Experiment:
    """Figures over the arrival rate, and the working sets."""
    row = TABLE3[calibration].online
    jobs = {
        (name, mode, aps): Job(name, mode, row, calibration, aps=aps)
        for name, points in ONLINE_RATES.items()
        for mode in ("basic", "dualpath", "oracle")
        for aps in points
    }
    results = yield jobs.values()
    found = Found()
    main = "ds-660b-2p4d"
    for aps, name in ((0.1, "0.1"), (0.45, "0.45")):
        result = results[jobs[main, "dualpath", aps]]
        found.values[f"workingset.{name}"] = (
            _working_set_bytes(aps, result["jct_s"], row, calibration) / 1e9
        )
        found.notes[f"workingset.{name}"] = f"JCT {result['jct_s']:.0f} s, read as {row.upper()}"
    curves = {
        name: {
            mode: [_online_point(results[jobs[name, mode, aps]]) for aps in points]
            for mode in ("basic", "dualpath", "oracle")
        }
        for name, points in ONLINE_RATES.items()
    }
    # The figure has bars for both at every rate: a run that ended above the limit counts with its
    # last window.
    before = {
        mode: [
            sum(split[part]["mean"] for part in ("schedule", "allocate", "read"))
            for aps in ONLINE_RATES[main]
            if (split := results[jobs[main, mode, aps]]["ttft_split_s"])
        ]
        for mode in ("basic", "dualpath")
    }
    growth = {mode: max(values) - values[0] for mode, values in before.items()}
    found.values["ttft_split.trend"] = float(growth["basic"] > 2 * growth["dualpath"])
    found.notes["ttft_split.trend"] = (
        f"growth {growth['basic']:.2f} s against {growth['dualpath']:.2f} s"
    )
    both = [
        (base["jct_s"], ours["jct_s"])
        for base, ours in zip(curves[main]["basic"], curves[main]["dualpath"], strict=True)
        if base["jct_s"] is not None and ours["jct_s"] is not None
    ]
    never_slower = all(ours <= base * 1.01 for base, ours in both)
    faster_growth = both[-1][0] / both[0][0] >= both[-1][1] / both[0][1]
    found.values["jct_aps.trend"] = float(len(both) > 1 and never_slower and faster_growth)
    found.series["rates"] = {
        name: {"aps": list(points), "modes": curves[name]} for name, points in ONLINE_RATES.items()
    }
    return found


def scaling(which: str) -> Callable[[str], Experiment]:
    """Appends, or generation, x 1, 2, 4."""

    def experiment(calibration: str) -> Experiment:
        jobs = {
            (mode, factor): Job(
                "ds-660b-2p4d",
                mode,
                "64k",
                calibration,
                agents=1024,
                append_scale=factor if which == "append" else 1,
                gen_scale=factor if which == "gen" else 1,
            )
            for mode in ("basic", "dualpath")
            for factor in SCALES
        }
        results = yield jobs.values()
        found = Found()
        jct = {key: _jct(results[job]) for key, job in jobs.items()}
        speedups = [jct["basic", factor] / jct["dualpath", factor] for factor in SCALES]
        found.values[f"{which}.trend"] = float(min(speedups) >= 1.5)
        found.notes[f"{which}.trend"] = "ours " + ", ".join(f"{one:.2f}" for one in speedups)
        found.series[which] = {
            "factors": list(SCALES),
            "jct_s": {
                mode: [jct[mode, factor] for factor in SCALES] for mode in ("basic", "dualpath")
            },
        }
        return found

    return experiment


EXPERIMENTS: Final[dict[str, tuple[Callable[[str], Experiment], tuple[str, ...]]]] = {
    "pd_range": (pd_range, ("pd_min", "pd_max")),
    "table1": (table1, ("table1",)),
    "table2": (table2, ("table2",)),
    "ablation": (ablation, ("ablation",)),
    "offline": (offline, ("speedup", "oracle", "qwen")),
    "pd_ratios": (pd_ratios, ("pd",)),
    "scale": (scale, ("scale", "scheduler")),
    "online": (online, ("online",)),
    "balance": (balance, ("snic", "attention")),
    "capacity": (capacity, ("capacity",)),
    "rates": (rates, ("workingset", "ttft_split", "jct_aps")),
    "append": (scaling("append"), ("append",)),
    "gen": (scaling("gen"), ("gen",)),
}
"""By name: the generator, and the groups of rows it answers."""


def _jct(result: dict[str, Any]) -> float:
    """Of an offline run: until all requests have finished (section 7.3)."""
    value = result["duration_s"]
    assert isinstance(value, float)
    return value


def _working_set_bytes(aps: float, jct_s: float, row: str, calibration: str) -> float:
    """Section 8.2: arrivals x mean life x half the mean trajectory."""
    total = trace_stats(synthesise(ROWS[row])).total
    token_bytes = preset("ds-660b-2p4d", "dualpath", calibration).model.kv_bytes_per_token
    return aps * jct_s * total / 2 * token_bytes


def _mean_s(result: dict[str, Any], figure: str) -> float:
    spread = result["ttft_s"] if figure == "ttft" else result[figure]
    return float("inf") if spread is None else float(spread["mean"])


def _online_point(result: dict[str, Any]) -> dict[str, Any]:
    """What a figure over the rate draws; nothing of a run that was given up."""
    given_up = result["overloaded"]
    return {
        "ttft_s": None if given_up else result["ttft_s"]["mean"],
        "ttst_s": None if given_up else result["ttst_s"],
        "tpot_s": None if given_up else result["tpot_s"],
        "jct_s": None if given_up else result["jct_s"],
        "split_s": {}
        if given_up
        else {name: part["mean"] for name, part in result["ttft_split_s"].items()},
        "overloaded": given_up,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
