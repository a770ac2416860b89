"""The page of a lab experiment: what was measured on several hosts of one machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dualpath.config import Mode
from dualpath.report.lab.bounds import BALANCE_REQUESTS, SNIC_WINDOW_S, pooled_bound, rates
from dualpath.report.lab.results import (
    SAMPLES,
    SUMMARY,
    CaseSummary,
    Check,
    IsolationResult,
    Summary,
    VariantSummary,
    read,
    read_samples,
    readable,
)
from dualpath.report.page import Cell, Section, Table, page
from dualpath.report.plots import Panel, bars, lines

_TRAILS: Final[tuple[str, ...]] = ("basic", "pe-only", "dualpath", "split")
"""Variants whose NICs are shown over time: those that read, most telling first."""
_MOST_TRAILS: Final = 3
_PHASES: Final = ("tokenise", "schedule", "allocate", "read", "prefill", "handover")
_MBIT: Final = 8e-6


def lab_page(folder: Path) -> str:
    """The page of the experiment in ``folder``.

    Raises:
        ResultError: the folder holds no experiment, or not all of it.
    """
    summary = read(folder / SUMMARY, Summary)
    sections = []
    if summary.failures or summary.skipped:
        sections.append(_gaps(summary))
    if summary.cases:
        sections += [_times(summary), *(_nics(folder, summary, case) for case in summary.cases)]
        sections += [_split(summary), _paths(summary)]
        if any(one.prediction for case in summary.cases for one in case.variants.values()):
            sections.append(_simulated(summary))
        if summary.capacity_aps:
            sections.append(_capacity(summary))
        sections += [_targets(summary), _figures(summary)]
    if summary.isolation:
        sections.append(_isolation(summary.isolation, summary.isolation_checks))
    return page(f"Lab: {summary.title}", _lead(summary), sections)


def _lead(summary: Summary) -> str:
    parts = [
        f"Each node reads storage at {summary.snic_bytes_per_s * _MBIT:.0f} Mbit/s and reaches "
        f"other nodes at {summary.cnic_bytes_per_s * _MBIT:.0f} Mbit/s; {summary.machine}."
    ]
    for case in summary.cases:
        first = next(iter(case.variants))
        gains = [f"{name} {gain:.2f} times" for name, gain in case.speedup.items() if name != first]
        text = (
            f"{case.name}: {_counted(case.agents, 'agent')} on {_counted(case.prefill, 'prefill')} "
            f"and {_counted(case.decode, 'decode node')}, {case.hit_ratio:.0%} of their prompts "
            "stored"
        )
        parts.append(
            f"{text}; they finish sooner than with {first}: {', '.join(gains)}" if gains else text
        )
    if summary.cases:
        parts.append(
            {
                True: "Every token is the plain vLLM's.",
                False: f"TOKENS DIFFER: {summary.first_difference}",
                None: "Not every run's tokens were compared with the plain vLLM's.",
            }[summary.tokens_equal]
        )
    if any(one.run.mode == Mode.ORACLE.value for case in summary.cases
           for one in case.variants.values()):  # fmt: skip
        parts.append("Oracle moves no KV, so that its tokens mean nothing.")
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 or what == "prefill" else f"{count} {what}s"


def _variants(summary: Summary) -> list[str]:
    """Of all cases, in order, each once."""
    return list(dict.fromkeys(name for case in summary.cases for name in case.variants))


def _gaps(summary: Summary) -> Section:
    section = Section("What is not here")
    if summary.failures:
        rows: list[list[Cell | str]] = [[one.where, one.what] for one in summary.failures]
        section.table(Table(["failed", "why"], rows))
    for line in summary.skipped:
        section.text(f"Left out: {line}.")
    return section


def _capacity(summary: Summary) -> Section:
    rows: list[list[Cell | str]] = []
    for case in summary.cases:
        for name, one in case.variants.items():
            slo = one.run.figures.get("slo") or {}
            rows.append(
                [
                    f"{case.name} {name}",
                    _seconds((one.run.figures.get("ttft_s") or {}).get("mean")),
                    _milliseconds(one.run.figures.get("tpot_s")),
                    Cell(f"{slo.get('attained', 0.0):.0%}", number=True),
                    Cell("kept" if one.run.slo_met else "missed", good=one.run.slo_met),
                    one.run.ended,
                ]
            )
    most = ", ".join(f"{name} {aps:g}" for name, aps in summary.capacity_aps.items())
    return (
        Section("Which rates are served")
        .table(Table(["rate and mode", "TTFT", "TPOT", "requests within", "limits", ""], rows))
        .text(
            "Limits: mean TTFT 4 s, mean TPOT 50 ms, and every agent finishes. Highest rate up to "
            f"which all were kept, agents a second (0: none): {most}."
        )
    )


def _times(summary: Summary) -> Section:
    names = [case.name for case in summary.cases]
    series = {
        variant: [_figure(case.variants.get(variant), "jct_s") for case in summary.cases]
        for variant in _variants(summary)
    }
    panel = Panel("job completion time", "", "seconds, mean over agents", names, series)
    return Section("How long agents take").plot(
        bars([panel]),
        "From an agent's arrival to the end of its last answer; shorter is better. Each bar is the "
        "run with the median of its repeats.",
    )


def _nics(folder: Path, summary: Summary, case: CaseSummary) -> Section:
    shown = [name for name in _TRAILS if name in case.variants]
    if len(shown) > _MOST_TRAILS:
        shown.remove("pe-only")  # like basic: only prefill nodes read
    shown = shown or list(case.variants)[:_MOST_TRAILS]
    trails = {
        name: rates(
            read_samples(folder / case.variants[name].run.folder / SAMPLES),
            "snic_rx_bytes",
            SNIC_WINDOW_S,
        ).read_bytes
        for name in shown
    }
    whole = SNIC_WINDOW_S * summary.snic_bytes_per_s
    count = max((len(one) for trail in trails.values() for one in trail.values()), default=0)
    x = [SNIC_WINDOW_S * (at + 0.5) for at in range(count)]
    panels = [
        Panel(
            name, "seconds", "% of the storage NIC", x,
            {node: _padded([100 * value / whole for value in one], count)
             for node, one in trail.items()},
            y_limit=110.0,
        )
        for name, trail in trails.items()
    ]  # fmt: skip
    return Section(f"Storage NICs over time, {case.name}").plot(
        lines(panels, markers=False),
        "Bytes received by each node's storage NIC, counted by the kernel, second by second. Where "
        "only prefill nodes read, the decode nodes' NICs idle.",
    )


def _padded(values: list[float], count: int) -> list[float | None]:
    """To the same length of time in all panels: a run that is over reads nothing."""
    return [*values, *[0.0] * (count - len(values))]


def _split(summary: Summary) -> Section:
    panels = []
    for case in summary.cases:
        splits = {
            name: one.run.ttft_split_s
            for name, one in case.variants.items()
            if one.run.ttft_split_s  # only a front of ours tells
        }
        series = {phase: [split.get(phase, 0.0) for split in splits.values()] for phase in _PHASES}
        panels.append(Panel(case.name, "", "seconds, mean", list(splits), series))
    return _in_rows(
        Section("Where the time to the first token goes"),
        panels,
        "read: hit blocks come from storage. Each bar is the mean over the run's requests.",
    )


def _paths(summary: Summary) -> Section:
    panels = []
    for case in summary.cases:
        reading = {
            name: path
            for name, one in case.variants.items()
            # Only a front of ours tells, and oracle chooses paths but reads nothing.
            if (path := one.run.figures.get("path")) is not None
            and one.run.mode != Mode.ORACLE.value
        }
        series = {
            f"by {side}": [path.get(key, 0) / 1e6 for path in reading.values()]
            for key, side in (("pe", "prefill nodes"), ("de", "decode nodes"))
        }
        panels.append(Panel(case.name, "", "MB of stored KV", list(reading), series))
    return _in_rows(Section("Who reads the stored KV"), panels, "Bytes of hit blocks by read path.")


def _in_rows(section: Section, panels: Sequence[Panel], caption: str) -> Section:
    """Stacked bars, as many panels beside each other as can be read."""
    for at in range(0, len(panels), _MOST_TRAILS):
        section.plot(bars(panels[at : at + _MOST_TRAILS], stacked=True), caption)
    return section


def _simulated(summary: Summary) -> Section:
    section = Section("The simulator against the measurement")
    panels: list[Panel] = []
    rows: list[list[Cell | str]] = []
    for case in summary.cases:
        both = {name: one for name, one in case.variants.items() if one.prediction is not None}
        if not both:
            continue
        panels.append(
            Panel(
                case.name, "", "JCT, seconds", list(both),
                {
                    "measured": [_figure(one, "jct_s") for one in both.values()],
                    "simulated": [_predicted(one) for one in both.values()],
                },
            )
        )  # fmt: skip
        for name, one in both.items():
            assert one.prediction is not None
            rows.append(
                [
                    f"{case.name} {name}",
                    _seconds(_figure(one, "jct_s")),
                    _seconds(one.prediction.jct_s),
                    Cell(f"{one.prediction.error:+.0%}", number=True),
                ]
            )
    for at in range(0, len(panels), _MOST_TRAILS):
        section.plot(
            bars(panels[at : at + _MOST_TRAILS]),
            "The same agents in the simulator, given the rates measured in these runs.",
        )
    return section.table(Table(["case and mode", "measured", "simulated", "error"], rows))


def _targets(summary: Summary) -> Section:
    rows = [
        [f"{case.name} {check.name}", *_judged(check)]
        for case in summary.cases
        for check in case.checks
    ]
    section = Section("Targets")
    if not rows:
        return section.text("These cases have none.")
    return section.table(Table(["figure", "measured", "target", "", "what it is"], rows))


def _judged(check: Check) -> list[Cell | str]:
    sign = "at most" if check.at_most else "at least"
    return [
        Cell("-" if check.value is None else readable(check.value), number=True),
        Cell(f"{sign} {readable(check.target)}", number=True),
        Cell("met" if check.met else "missed", good=check.met),
        check.text,
    ]


def _figures(summary: Summary) -> Section:
    head = [
        "case and mode", "JCT", "runs", "TTFT", "TTST", "TPOT", "hit MB", "SNIC MB, kernel",
        "max / mean", "all busy", "CPU s",
    ]  # fmt: skip
    rows: list[list[Cell | str]] = []
    for case in summary.cases:
        for name, one in case.variants.items():
            run = one.run
            figures = run.figures
            ttft = (figures.get("ttft_s") or {}).get("mean")
            hits = sum((figures.get("path") or {}).get(side, 0) for side in ("pe", "de"))
            kernel = sum(nic.snic_rx_bytes for nic in run.nics.values())
            rows.append(
                [
                    f"{case.name} {name}",
                    _seconds(run.jct_s),
                    Cell(
                        " ".join(
                            "-" if value is None else f"{value:.1f}" for value in one.jct_runs_s
                        ),
                        number=True,
                    ),
                    _seconds(ttft),
                    _seconds(figures.get("ttst_s")),
                    _milliseconds(figures.get("tpot_s")),
                    Cell(f"{hits / 1e6:,.0f}", number=True),
                    Cell(f"{kernel / 1e6:,.0f}", number=True),
                    _ratio(run.snic_max_over_mean),
                    Cell(f"{run.busy.share:.0%}", number=True),
                    Cell(f"{sum(run.cpu_s.values()):.1f}", number=True),
                ]
            )
    bounds = ", ".join(
        f"{case.name} {pooled_bound(case.prefill, case.decode):.2f}" for case in summary.cases
    )
    balances = ", ".join(
        f"{case.name} {readable(case.balance.storage_over_compute)}"
        for case in summary.cases
        if case.balance is not None
    )
    return (
        Section("Figures")
        .table(Table(head, rows))
        .text(
            "runs: JCT of every repeat. max / mean: busiest storage NIC over the mean one, mean "
            f"over windows of {BALANCE_REQUESTS} requests a NIC until the first agent was over. "
            "all busy: part of the run in which every node that may read had reads waiting. Most "
            "that the second path can gain: "
            f"{bounds}."
            + (
                " Seconds in which one storage NIC reads a request's hits over seconds in which "
                f"one node computes the rest: {balances}."
                if balances
                else ""
            )
        )
    )


def _isolation(results: Sequence[IsolationResult], checks: Sequence[Check]) -> Section:
    names = [result.name for result in results]
    solo = results[0]
    targets = {check.name: check.target for check in checks}
    rate_marks = {"target": targets["rate.on"]} if "rate.on" in targets else {}
    p99_marks = {"target": targets["p99.on"] * solo.p99_s * 1e3} if "p99.on" in targets else {}
    p99_ms = [one.p99_s * 1e3 for one in results]
    panels = [
        Panel("rate of all-reduces", "", "of that without KV", names,
              {"model traffic": [one.bytes_per_s / solo.bytes_per_s for one in results]},
              marks=rate_marks),
        Panel("99th percentile of one", "", "milliseconds", names,
              {"model traffic": p99_ms},
              y_limit=1.1 * max(*p99_ms, *p99_marks.values()),
              marks=p99_marks),
        Panel("KV moved meanwhile", "", "Mbit/s, both ways", names,
              {"KV": [one.kv_bytes_per_s * _MBIT for one in results]}),
    ]  # fmt: skip
    rows: list[list[Cell | str]] = [[check.name, *_judged(check)] for check in checks]
    return (
        Section("Traffic classes: model traffic beside KV")
        .plot(
            bars(panels),
            "solo: no KV. on: KV in its own class. off: KV in the model's class. The model traffic "
            "is synthetic: gloo's all-reduce between two nodes.",
        )
        .table(Table(["figure", "measured", "target", "", "what it is"], rows))
    )


def _figure(one: VariantSummary | None, name: str) -> float | None:
    value: Any = None if one is None or one.run.ended else one.run.figures.get(name)
    return None if value is None or math.isnan(value) else float(value)


def _predicted(one: VariantSummary) -> float | None:
    return one.prediction.jct_s if one.prediction else None


def _seconds(value: float | None) -> Cell:
    return Cell("-" if value is None else f"{value:.3g} s", number=True)


def _milliseconds(value: float | None) -> Cell:
    return Cell("-" if value is None else f"{value * 1e3:.3g} ms", number=True)


def _ratio(value: float | None) -> Cell:
    return Cell("-" if value is None else f"{value:.2f}", number=True)
