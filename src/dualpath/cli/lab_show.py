"""Shows what a lab's experiment gave, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dualpath.report.lab.results import Check, IsolationResult, Summary, readable


def show_summary(summary: Summary) -> None:
    """Tables on standard output: what was measured, and how it is judged."""
    console = Console()
    table = Table(title=f"{summary.title}; {summary.machine}")
    words = ("case", "mode", "tokens")
    for name in ("case", "mode", "JCT, s", "sooner", "TTFT, s", "TPOT, ms", "simulated", "tokens"):
        table.add_column(name, justify="left" if name in words else "right", no_wrap=name in words)
    for case in summary.cases:
        for name, one in case.variants.items():
            figures, guess, gain = one.run.figures, one.prediction, case.speedup.get(name)
            table.add_row(
                case.name,
                name,
                _number(one.run.jct_s),
                _number(gain),
                _number((figures["ttft_s"] or {}).get("mean")),
                _number(figures["tpot_s"], 1e3),
                f"{guess.jct_s:.3g} ({guess.error:+.0%})" if guess else "-",
                {True: "equal", False: "differ", None: "-"}[one.tokens_equal],
            )
    if summary.cases:
        console.print(table)
    for case in summary.cases:
        for name, one in case.variants.items():
            if one.run.ended:
                console.print(f"{case.name} {name}: not served: {one.run.ended}", highlight=False)
    for name, aps in summary.capacity_aps.items():
        console.print(f"{name}: up to {aps:g} agents a second within the limits", highlight=False)
    for line in summary.skipped:
        console.print(f"left out: {line}", highlight=False)
    if summary.isolation:
        console.print(_isolation(summary.isolation))
    checks = Table(title="targets")
    for name in ("figure", "measured", "target", ""):
        checks.add_column(name, justify="left" if name == "figure" else "right")
    for where, check in _checks(summary):
        checks.add_row(
            f"{where} {check.name}",
            "-" if check.value is None else readable(check.value),
            f"{'<=' if check.at_most else '>='} {readable(check.target)}",
            "met" if check.met else "missed",
        )
    if checks.row_count:
        console.print(checks)


def _isolation(results: list[IsolationResult]) -> Table:
    table = Table(title="all-reduces of model traffic beside KV")
    for name in ("KV", "Mbit/s", "p50, ms", "p99, ms", "KV Mbit/s"):
        table.add_column(name, justify="left" if name == "KV" else "right")
    for one in results:
        rates = [f"{rate * 8e-6:.1f}" for rate in (one.bytes_per_s, one.kv_bytes_per_s)]
        times = [_number(seconds, 1e3) for seconds in (one.p50_s, one.p99_s)]
        table.add_row(one.name, rates[0], *times, rates[1])
    return table


def _checks(summary: Summary) -> list[tuple[str, Check]]:
    return [
        *((case.name, check) for case in summary.cases for check in case.checks),
        *((summary.experiment, check) for check in summary.isolation_checks),
    ]


def _number(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.3g}"
