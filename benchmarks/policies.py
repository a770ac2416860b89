"""Scheduling policies side by side in the simulator, paired by seed: TTFT, JCT, TPOT.

For every case and seed the same agents arrive at the same moments under every policy. The figure
of a row is the median over seeds; a ratio is the median of the seeds' own ratios to ``paper``, and
the worst seed's is beside it. Virtual time, so what else the machine does has no influence; the
default takes about two minutes of a quiet core; ``--cases`` has longer ones, too.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from common import arguments, finish, machine, say, table
from dualpath.sim import MAIN_CALIBRATION, SimResult, preset, simulate
from dualpath.workload.synth import PAPER_TRAJECTORIES, ROWS, synthesise
from dualpath.workload.trace import Trajectory

BASE = "paper"
CALIBRATION = MAIN_CALIBRATION
POLICIES = (BASE, "split", "least_work/balanced/shorter_queue", "work")


@dataclass(frozen=True, slots=True)
class Case:
    """``agents`` of a row of Table 2 on a cluster, arriving at ``aps`` (None: at once), the first
    ``rounds`` of each (0: all). All of them run to their end, so that every policy serves the same
    requests and a JCT is of the same agents.
    """

    preset: str
    row: str
    agents: int
    aps: float | None = None
    rounds: int = 0


CASES = {
    # One PE group: what the measure of load does by itself.
    "660b-2p4d": Case("ds-660b-2p4d", "32k", 200, aps=2.5, rounds=16),
    "660b-12p24d": Case("ds-660b-12p24d", "32k", 1000, aps=18.0, rounds=12),
    "660b-12p24d-offline": Case("ds-660b-12p24d", "32k", 1000, rounds=12),
    "660b-24p48d": Case("ds-660b-24p48d", "32k", 2000, aps=36.0, rounds=10),
    "27b-4p8d": Case("ds-27b-4p8d", "32k", 1000, aps=50.0, rounds=10),
    # Whole lives: a tenth of the load is first prompts above, a sixtieth here.
    "660b-2p4d-whole": Case("ds-660b-2p4d", "32k", 400, aps=1.08),
    "660b-12p24d-whole": Case("ds-660b-12p24d", "32k", 2200, aps=6.5),
}
DEFAULT = [name for name in CASES if not name.endswith("-whole")]


@cache
def trajectories_of(case: Case) -> list[Trajectory]:
    """What the agents of a case do."""
    whole = synthesise(ROWS[case.row], PAPER_TRAJECTORIES)
    return [Trajectory(one.id, one.rounds[: case.rounds or None]) for one in whole]


def measure(name: str, policy: str, seed: int) -> dict[str, Any]:
    """One run."""
    case = CASES[name]
    spec = preset(case.preset, calibration=CALIBRATION)
    spec = replace(spec, features=replace(spec.features, policy=policy))
    trajectories = list(trajectories_of(case))
    if case.aps is None:  # else the seed is that of the arrivals
        random.Random(seed).shuffle(trajectories)
    result = simulate(spec, trajectories, agents=case.agents, aps=case.aps, seed=seed)
    return {"case": name, "policy": policy, "seed": seed, **figures(result)}


def figures(result: SimResult) -> dict[str, Any]:
    """What is compared; a run that was given up or lost a request is no figure."""
    if result.overloaded or result.failed:
        raise RuntimeError(f"{result.name}: overloaded {result.overloaded}, failed {result.failed}")
    ttft, tpot, jct = result.ttft, result.tpot, result.jct
    if ttft is None or tpot is None or jct is None:
        raise RuntimeError(f"{result.name}: nothing was measured")
    return {
        "requests": len(result.samples.ttft_s),
        "ttft_mean_s": ttft.mean,
        "ttft_p50_s": ttft.p50,
        "ttft_p99_s": ttft.p99,
        "jct_s": jct.mean,
        "tpot_s": tpot.mean,
        "read_p99_s": result.ttft_split["read"].p99,
        "prefill_p99_s": result.ttft_split["prefill"].p99,
        "snic_max_over_mean": result.snic_max_over_mean,
        "scheduler_cores": result.scheduler_cores,
    }


def summary(runs: Sequence[dict[str, Any]], case: str, policy: str) -> dict[str, Any]:
    """Medians over the seeds, and ratios to ``paper`` of the same seed."""
    mine = {run["seed"]: run for run in runs if (run["case"], run["policy"]) == (case, policy)}
    base = {run["seed"]: run for run in runs if (run["case"], run["policy"]) == (case, BASE)}

    def median(key: str) -> float:
        return statistics.median(run[key] for run in mine.values())

    row: dict[str, Any] = {"case": case, "policy": policy, "seeds": len(mine)}
    for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "jct_s", "tpot_s"):
        row[key] = median(key)
    for key in ("ttft_p99", "jct", "tpot"):
        ratios = [mine[seed][f"{key}_s"] / base[seed][f"{key}_s"] for seed in mine if seed in base]
        if ratios:
            row[f"{key}_ratio"], row[f"{key}_worst"] = statistics.median(ratios), max(ratios)
    return row


def main() -> None:
    """Measure and print; ``--json`` prints one JSON line last."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=DEFAULT)
    parser.add_argument("--policies", nargs="+", default=[BASE, "work"], help=f"of {POLICIES}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "runs": [], "rows": []}
    with ProcessPoolExecutor(args.workers) as pool:
        todo = product(args.cases, range(args.seeds), args.policies)
        jobs = [pool.submit(measure, case, policy, seed) for case, seed, policy in todo]
        for job in as_completed(jobs):
            run = job.result()
            result["runs"].append(run)
            say(
                f"{run['case']} {run['policy']} seed {run['seed']}: "
                f"p99 TTFT {run['ttft_p99_s']:.3f} s, JCT {run['jct_s']:.1f} s"
            )
    rows = [summary(result["runs"], *pair) for pair in product(args.cases, args.policies)]
    result["rows"] = rows
    table(rows, list(rows[0] | rows[-1]))
    finish(result, args.json)


if __name__ == "__main__":
    main()
