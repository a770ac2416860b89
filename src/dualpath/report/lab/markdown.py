"""The lab's results as Markdown, for documents: a table of figures and one of targets for each
experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dualpath.report.lab.results import (
    SUMMARY,
    CaseSummary,
    Check,
    ResultError,
    Summary,
    VariantSummary,
    read,
    readable,
)

_MBIT = 8e-6


def lab_tables(folder: Path) -> str:
    """The tables of the experiment in ``folder``, or of all that are in folders of it, by name.

    Raises:
        ResultError: there is none, or one cannot be read.
    """
    if (folder / SUMMARY).exists():
        return tables_of(read(folder / SUMMARY, Summary))
    paths = sorted(folder.glob(f"*/{SUMMARY}"))
    if not paths:
        raise ResultError(f"{folder}: no {SUMMARY} in it or in a folder of it")
    return "\n".join(tables_of(read(path, Summary)) for path in paths)


def tables_of(summary: Summary) -> str:
    """One experiment's, ending in a newline."""
    parts = [_head(summary)]
    if summary.cases:
        parts.append(_figures(summary.cases))
    if summary.isolation:
        parts.append(_isolation(summary))
    checks = [
        *((case.name, check) for case in summary.cases for check in case.checks),
        *(("", check) for check in summary.isolation_checks),
    ]
    if checks:
        parts.append(_checks(checks))
    if summary.capacity_aps:
        most = ", ".join(f"`{name}` {aps:g}" for name, aps in summary.capacity_aps.items())
        parts.append(f"Agents a second up to which the limits were kept (0: none): {most}.")
    parts += [f"Failed: {failure}." for failure in summary.failures]
    parts += [f"Left out: {line}." for line in summary.skipped]
    return "\n\n".join(parts) + "\n"


def _head(summary: Summary) -> str:
    rates = (f"{rate * _MBIT:g}" for rate in (summary.snic_bytes_per_s, summary.cnic_bytes_per_s))
    tokens = {
        True: " Every token was the plain vLLM's.",
        False: f" **Tokens differed**: {summary.first_difference}.",
        None: " Not every run's tokens were compared." if summary.cases else "",
    }[summary.tokens_equal]
    return (
        f"**`{summary.experiment}`**, storage and compute NICs of {' and '.join(rates)} Mbit/s, "
        f"{summary.machine}.{tokens}"
    )


def _figures(cases: Sequence[CaseSummary]) -> str:
    head = ["case", "mode", "JCT, s", "runs", "sooner", "TTFT, s", "TTST, s", "TPOT, ms",
            "busy, MB/s", "max / mean", "simulated"]  # fmt: skip
    rows = [
        [case.name, f"`{name}`", *_cells(one, case.speedup.get(name))]
        for case in cases
        for name, one in case.variants.items()
    ]
    return _table(head, rows, left=2)


def _cells(one: VariantSummary, gain: float | None) -> list[str]:
    run, guess = one.run, one.prediction
    figures = run.figures
    return [
        _number(run.jct_s, ".3g") if not run.ended else "not served",
        ", ".join(_number(value, ".3g") for value in one.jct_runs_s),
        _number(gain, ".2f"),
        _number((figures.get("ttft_s") or {}).get("mean"), ".3g"),
        _number(figures.get("ttst_s"), ".3g"),
        _number(figures.get("tpot_s"), ".3g", 1e3),
        _number(run.busy.rate_bytes_per_s, ".2f", 1e-6),
        _number(run.snic_max_over_mean, ".2f"),
        f"{guess.jct_s:.3g} s ({guess.error:+.0%})" if guess else "",
    ]


def _isolation(summary: Summary) -> str:
    rows = [
        [f"`{one.name}`", f"{one.bytes_per_s * _MBIT:.0f}", f"{one.p50_s * 1e3:.0f}",
         f"{one.p99_s * 1e3:.0f}", f"{one.kv_bytes_per_s * _MBIT:.0f}"]
        for one in summary.isolation
    ]  # fmt: skip
    head = ["KV", "all-reduces, Mbit/s", "p50, ms", "p99, ms", "KV, Mbit/s"]
    return _table(head, rows, left=1)


def _checks(checks: Sequence[tuple[str, Check]]) -> str:
    rows = [
        [
            f"{where} `{check.name}`".strip(),
            "" if check.value is None else readable(check.value),
            f"{'at most' if check.at_most else 'at least'} {readable(check.target)}",
            "met" if check.met else "**missed**",
        ]
        for where, check in checks
    ]
    return _table(["target", "measured", "wanted", ""], rows, left=1)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _number(value: float | None, spec: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, spec)
