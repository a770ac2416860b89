"""How near draws of a row's 500 trajectories come to Table 2: the seeds in ``workload.synth.ROWS``.

For every row and seed the worst of the five columns counts (macro reading). Prints each row's best
seeds with their longest trajectory, and the median of that over all seeds. 400 seeds take two
minutes of a core.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import arguments, finish, machine, say, table
from dualpath.workload.stats import trace_stats
from dualpath.workload.synth import ROWS, Row, synthesise


def rate(row: Row, seed: int) -> dict[str, Any]:
    """One draw."""
    trajectories = list(synthesise(row, seed=seed))
    found = trace_stats(trajectories)
    macro = found.macro
    columns = (found.turns, macro.append, macro.gen, found.total, macro.context)
    return {
        "row": row.name,
        "seed": seed,
        "worst": max(abs(a / b - 1) for a, b in zip(columns, row.paper, strict=True)),
        "longest_rounds": max(len(one.rounds) for one in trajectories),
    }


def main() -> None:
    """Rate and print; ``--json`` prints one JSON line last."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--best", type=int, default=3, help="rows shown")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "rows": []}
    for row in ROWS.values():
        say(f"{row.name}: {args.seeds} seeds")
        draws = [rate(row, seed) for seed in range(args.seeds)]
        longest = statistics.median(one["longest_rounds"] for one in draws)
        draws.sort(key=lambda one: one["worst"])
        for one in draws[: args.best]:
            result["rows"].append({**one, "median_longest_rounds": longest})
    table(result["rows"], ("row", "seed", "worst", "longest_rounds", "median_longest_rounds"))
    finish(result, args.json)


if __name__ == "__main__":
    main()
