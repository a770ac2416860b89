"""The reproduction as one HTML page: every row beside the paper's, plots in the paper's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualpath.report.page import Cell, Section, Table, page
from dualpath.report.paper.published import Kind
from dualpath.report.paper.reproduce import Reproduction, Row
from dualpath.report.plots import Panel, bars, lines

_MODEL_NAMES = {
    "ds-660b-2p4d": "DS 660B, 2P4D", "ds-27b-1p1d": "DS 27B, 1P1D",
    "qwen-32b-1p2d": "Qwen 32B, 1P2D",
}  # fmt: skip
_ABLATION = {
    "basic": "Basic", "layerwise": "+ layerwise", "alternating": "+ dual path",
    "dualpath": "+ scheduling",
}  # fmt: skip


def sheet(main: Reproduction, other: Reproduction | None) -> str:
    """The page. ``main`` is the declared calibration, ``other`` is printed beside it."""
    share = f"{main.met} of {len(main.rows)} rows are within tolerance under {main.calibration}"
    if other is not None:
        share += f", {other.met} under {other.calibration}"
    sections = [_rows(main, other), *_plots(main.series)]
    lead = (
        f"DualPath (arXiv 2602.21548) simulated with the scheduler that serves live. {share}. "
        "A missed row is shown as missed; tolerances were set beforehand."
    )
    return page("The paper's evaluation, reproduced", lead, sections)


def show(value: float | None) -> str:
    """A number with the digits a reader can use."""
    if value is None:
        return "-"
    if value == float("inf"):
        return "not served"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def show_error(row: Row) -> str:
    """Signed, as its kind is judged."""
    if row.kind is Kind.TREND:
        return ""
    return f"{row.error:+.1%}" if row.kind is Kind.REL else f"{row.error:+.2f}"


def show_tolerance(row: Row) -> str:
    """What was allowed."""
    if row.kind is Kind.REL:
        return "exact" if row.tolerance < 1e-6 else f"{row.tolerance:.0%}"
    if row.kind is Kind.UPPER:
        return f"at most {row.tolerance:g}"
    return "stated trend" if row.kind is Kind.TREND else f"{row.tolerance:g} points"


def show_ours(row: Row) -> str:
    """Our value; a trend holds or not."""
    if row.kind is Kind.TREND:
        return "holds" if row.met else "does not hold"
    return show(row.ours)


def _rows(main: Reproduction, other: Reproduction | None) -> Section:
    head = ["row", "of", "unit", "paper", f"ours ({main.calibration})", "error", "tolerance", ""]
    by_name = {} if other is None else {row.name: row for row in other.rows}
    if other is not None:
        head += [f"ours ({other.calibration})", ""]
    table = Table(
        [*head, "note"],
        [
            [
                row.name,
                row.where,
                row.unit,
                Cell(show(row.paper), number=True),
                Cell(show_ours(row), number=True),
                Cell(show_error(row), number=True),
                show_tolerance(row),
                _met(row),
                *(
                    []
                    if other is None
                    else [Cell(show_ours(by_name[row.name]), number=True), _met(by_name[row.name])]
                ),
                row.note,
            ]
            for row in main.rows
        ],
    )
    return Section("Every row").table(table)


def _met(row: Row) -> Cell:
    return Cell("met" if row.met else "missed", good=row.met)


def _plots(series: dict[str, Any]) -> list[Section]:
    sections = []
    if "offline" in series:
        section = Section("Offline: completion time by agents and length")
        for name, by_row in series["offline"].items():
            panels = [_jct_panel(row.upper(), data) for row, data in by_row.items()]
            section.plot(bars(panels), f"{_MODEL_NAMES[name]}. Until all have finished.")
        sections.append(
            section.text("The comparator is a model of SGLang with Mooncake, not a measurement.")
        )
    if "pd" in series:
        panels = [_jct_panel(row.upper(), data) for row, data in series["pd"].items()]
        caption = "DS 27B. Until all have finished."
        sections.append(Section("P/D ratios").plot(bars(panels), caption))
    if "rates" in series:
        sections += _online(series["rates"])
    if "ablation" in series:
        data = series["ablation"]
        named = {
            "agents": data["agents"],
            "jct_s": {_ABLATION[mode]: values for mode, values in data["jct_s"].items()},
        }
        panel = _jct_panel("64K", named)
        sections.append(Section("Ablation").plot(bars([panel]), "DS 660B, 2P4D, each step added."))
    scaled = [name for name in ("append", "gen") if name in series]
    if scaled:
        panels = [
            Panel(
                {"append": "Appends", "gen": "Generation"}[name],
                "factor",
                "JCT, s",
                [f"x {factor}" for factor in series[name]["factors"]],
                series[name]["jct_s"],
            )
            for name in scaled
        ]
        sections.append(Section("Longer appends, longer answers").plot(
            bars(panels), "DS 660B, 2P4D, 64K, 1,024 agents."
        ))  # fmt: skip
    if "balance" in series:
        sections.append(_balance(series["balance"]))
    return sections


def _jct_panel(title: str, data: dict[str, Any]) -> Panel:
    names = [f"{agents:,}" for agents in data["agents"]]
    return Panel(title, "agents", "JCT, s", names, data["jct_s"])


def _online(rates: dict[str, Any]) -> list[Section]:
    latency = Section("Online: latency over the arrival rate")
    split = Section("Online: where the time to the first token goes")
    jct = Section("Online: completion time over the arrival rate")
    for name, data in rates.items():
        title, aps, modes = _MODEL_NAMES[name], data["aps"], data["modes"]
        latency.plot(
            lines(
                [
                    Panel(
                        figure.upper(),
                        "agents a second",
                        "s",
                        aps,
                        {mode: _values(points, f"{figure}_s") for mode, points in modes.items()},
                        top,
                        marks,
                    )
                    for figure, top, marks in (
                        ("ttft", 8.0, {"limit": 4.0}),
                        ("ttst", None, None),
                        ("tpot", 0.1, {"limit": 0.05}),
                    )
                ]
            ),
            f"{title}, 64K. A rate that is not served has no point.",
        )
        split.plot(
            bars(
                [
                    Panel(
                        mode,
                        "agents a second",
                        "s",
                        [f"{rate:g}" for rate in aps],
                        {
                            part: [point["split_s"].get(part) for point in modes[mode]]
                            for part in ("schedule", "allocate", "read", "prefill")
                        },
                        8.0,
                    )
                    for mode in ("basic", "dualpath")
                ],
                stacked=True,
            ),
            f"{title}, 64K.",
        )
        jct.plot(
            lines(
                [
                    Panel(
                        title,
                        "agents a second",
                        "mean JCT, s",
                        aps,
                        {mode: _values(points, "jct_s") for mode, points in modes.items()},
                    )
                ]
            ),
            "Mean over the agents that arrived while measuring.",
        )
    return [latency, split, jct]


def _balance(series: dict[str, Any]) -> Section:
    section = Section("Balance over time")
    for figure, caption, label in (
        ("snic", "Storage NICs: busiest node over mean node, per window.", "max / avg"),
        ("attention", "Attention time: slowest engine over mean engine, first 5 %.", "max / avg"),
    ):
        panels = []
        for name, data in series.items():
            values = data[f"{figure}_max_over_mean"]
            if not values:
                continue
            at = (
                [data["snic_window_s"] * index for index in range(len(values))]
                if figure == "snic"
                else data["attention_start_s"]
            )
            panels.append(Panel(name, "s", label, at, {name: values}, 3.0))
        if panels:
            section.plot(lines(panels, markers=False), caption)
    return section


def _values(points: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    return [point[name] for point in points]
