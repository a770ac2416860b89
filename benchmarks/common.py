"""What the benchmarks share: alternating rounds, medians, the machine's state, output.

Every comparison is made in pairs: each round measures both sides, one right after the other, and
the next round in the opposite order, so that what else the machine does meets both. The figure of
a row is the median over rounds; a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Sample = dict[str, float]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--json``. From now on a SIGTERM ends the program in order, so that it takes
    its files and processes with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON last on stdout")
    return parser


def alternate(sides: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Measure every side once a round, in the opposite order every other round."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            samples[name].append(sides[name]())
        order.reverse()
    return samples


def median(samples: Sequence[Sample], key: str) -> float:
    """Median of one figure."""
    return statistics.median(sample[key] for sample in samples)


def paired_ratio(ours: Sequence[Sample], theirs: Sequence[Sample], key: str) -> float:
    """Median of the rounds' ratios ours / theirs."""
    return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, Any]:
    """Where and when: to be read beside every figure."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def finish(result: dict[str, Any], as_json: bool) -> None:
    """Add the load at the end and print."""
    result["load_1m_end"] = round(os.getloadavg()[0], 2)
    if as_json:
        print(json.dumps(result))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Rows as aligned text on stdout."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)
    ]
    for line in [list(columns), *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
