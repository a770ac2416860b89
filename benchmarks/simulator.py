"""How fast the simulator runs on one core: rounds a second at three sizes of the paper's cluster.

Offline runs of DeepSeek-V3.2 in ``dualpath`` mode, as many agents per node at every size, with the
trajectories of one row of Table 2. CPU seconds of the one thread, so that other work on the machine
does not count. ``--full`` is the paper's largest run: 48P96D, 48,000 agents, at least five million
rounds. ``--linear`` runs one size with a quarter, a half and all of every agent's rounds: the cost
must be linear in rounds. ``PYTHONPATH=build/compiled`` measures what ``make compiled`` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence

from dualpath.sim import preset, simulate
from dualpath.workload.synth import PAPER_TRAJECTORIES, ROWS, synthesise
from dualpath.workload.trace import Trajectory

SIZES = ("2p4d", "12p24d", "48p96d")
FULL = ("48p96d", 48_000)
AGENTS_PER_NODE = 100
QUIET_S = 10.0


def measure(
    size: str, agents: int, trajectories: Sequence[Trajectory], mode: str
) -> dict[str, float]:
    """One run."""
    spec = preset(f"ds-660b-{size}", mode)
    began_cpu, began = time.process_time(), time.perf_counter()
    said_s = began

    def progress(part: float, now_s: float) -> None:
        nonlocal said_s
        if time.perf_counter() - said_s > QUIET_S:
            said_s = time.perf_counter()
            print(f"{size}: {part:.0%} of the agents done, second {now_s:,.0f}", file=sys.stderr)

    result = simulate(spec, trajectories, agents=agents, progress=progress)
    cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
    if result.failed or result.agents_done != agents:
        raise RuntimeError(f"{size}: {result.agents_done} of {agents} agents ended")
    return {
        "engines": spec.cluster.gpus,
        "agents": agents,
        "rounds": result.requests,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "rounds_per_s": round(result.requests / cpu_s),
        "us_per_round": round(cpu_s / result.requests * 1e6, 1),
        "events_per_round": round(result.events / result.requests, 2),
        "simulated_s": round(result.duration_s, 1),
        "jct_s": round(result.jct.mean, 1) if result.jct is not None else 0.0,
        "scheduler_cores": round(result.scheduler_cores, 3),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def show(name: str, figures: dict[str, float]) -> None:
    """One line for people."""
    print(
        f"{name:>12}: {figures['rounds']:>9,} rounds, {figures['rounds_per_s']:>6,} a CPU second, "
        f"{figures['us_per_round']} us each, {figures['cpu_s']} s, "
        f"peak {figures['peak_rss_gib']} GiB",
        flush=True,
    )


def main() -> None:
    """Measure and print; ``--json`` prints one JSON line last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", choices=tuple(ROWS), help="of Table 2 [32k; --full: 48k]")
    parser.add_argument("--mode", default="dualpath")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--agents-per-node", type=int, default=AGENTS_PER_NODE)
    parser.add_argument("--full", action="store_true", help="the paper's largest run")
    parser.add_argument("--linear", action="store_true", help="the first size, three lengths")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    row = ROWS[args.row or ("48k" if args.full else "32k")]
    trajectories = list(synthesise(row, PAPER_TRAJECTORIES))
    runs: list[tuple[str, str, int, int]]  # name, size, agents, one part of the rounds
    if args.full:
        runs = [("full", *FULL, 1)]
    elif args.linear:
        size = args.sizes[0]
        runs = [
            (f"1/{part}", size, _nodes(size) * args.agents_per_node, part) for part in (4, 2, 1)
        ]
    else:
        runs = [(size, size, _nodes(size) * args.agents_per_node, 1) for size in args.sizes]
    results: dict[str, dict[str, float]] = {}
    for name, size, agents, part in runs:
        cut = [
            Trajectory(one.id, one.rounds[: -(-len(one.rounds) // part)]) for one in trajectories
        ]
        results[name] = measure(size, agents, cut, args.mode)
        show(name, results[name])
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "runs": results}))


def _nodes(size: str) -> int:
    prefill, _, decode = size.rstrip("d").partition("p")
    return int(prefill) + int(decode)


if __name__ == "__main__":
    main()
