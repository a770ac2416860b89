"""How the KV of live agents grows with the latency of tools, and what a DRAM tier still hits.

Tools take r times as long as serving a round. ``open``: agents arrive at the same rate whatever r
is. ``closed``: so many agents at once that the rounds a second stay the same. ``both``: r times the
arrivals, too. The exponents are least-squares slopes in log-log against 1 + r (what r multiplies a
round's time by) and, over r >= 1, against r. ``dram_hit`` is the part of the hit tokens found in
the prefill nodes' DRAM pools (mode ``comparator``) of one fixed size. Virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import arguments, finish, machine, say, table
from dualpath.sim import SimResult, preset, simulate
from dualpath.workload.synth import PAPER_TRAJECTORIES, ROWS, synthesise
from dualpath.workload.trace import Round, Trajectory

PRESET, ROW = "ds-27b-1p1d", "32k"


def trajectories(rounds: int, latency_s: float) -> list[Trajectory]:
    """The first rounds of every trajectory, with that latency after each."""
    return [
        Trajectory(
            one.id,
            tuple(
                Round(item.append_tokens, item.gen_tokens, latency_s)
                for item in one.rounds[:rounds]
            ),
        )
        for one in synthesise(ROWS[ROW], PAPER_TRAJECTORIES)
    ]


def run(
    rounds: int, latency_s: float, *, aps: float | None, agents: int, pool_bytes: float
) -> SimResult:
    """One run; online until the agents that arrive in four lives have ended."""
    spec = preset(PRESET, "comparator" if pool_bytes else "dualpath")
    if pool_bytes:
        spec = replace(spec, features=replace(spec.features, pool_bytes_per_node=pool_bytes))
    work = trajectories(rounds, latency_s)
    if aps is None:
        return simulate(spec, work, agents=agents)
    life_s = rounds * (latency_s + 4.0)
    return simulate(spec, work, aps=aps, warmup_s=1.5 * life_s, measure_s=life_s)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Exponent of y in x."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def main() -> None:
    """Measure and print; ``--json`` prints one JSON line last."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--aps", type=float, default=0.4)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 1.0, 2.0, 4.0])
    args = parser.parse_args()
    base = run(args.rounds, 0.0, aps=args.aps, agents=0, pool_bytes=0.0)
    assert base.jct is not None
    service_s = base.jct.mean / args.rounds
    pool = base.working_set_bytes  # what the tier holds without tools
    rows: list[dict[str, Any]] = []
    for ratio in args.ratios:
        for reading in ("open", "closed", "both"):
            if reading == "both" and not ratio:
                continue
            latency_s = ratio * service_s
            aps = None if reading == "closed" else args.aps * (ratio if reading == "both" else 1.0)
            agents = round(args.aps * base.jct.mean * (1 + ratio) * 2)
            plain = run(args.rounds, latency_s, aps=aps, agents=agents, pool_bytes=0.0)
            tiered = run(args.rounds, latency_s, aps=aps, agents=agents, pool_bytes=pool)
            assert plain.jct is not None
            rows.append(
                {
                    "reading": reading,
                    "r": ratio,
                    "jct_s": plain.jct.mean,
                    "rounds_per_s": plain.requests / plain.duration_s,
                    "gb": plain.working_set_bytes / 1e9,
                    "dram_hit": tiered.pool_hit_tokens / tiered.hit_tokens,
                }
            )
            say(str(rows[-1]))
    exponents = {}
    for reading in ("open", "closed", "both"):
        mine = [row for row in rows if row["reading"] == reading]
        exponents[reading] = {
            "1+r": slope([(1 + row["r"], row["gb"]) for row in mine]),
            "r": slope([(row["r"], row["gb"]) for row in mine if row["r"] >= 1]),
        }
    table(rows, list(rows[0]))
    print(exponents)
    result = {"machine": machine(), "service_s": service_s, "tier_gb": pool / 1e9, "rows": rows}
    finish(result | {"exponents": exponents}, args.json)


if __name__ == "__main__":
    main()
