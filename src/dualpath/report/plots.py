"""Plots as SVG text, to stand inside one HTML page.

One look for all: a system keeps its colour in every plot of a page, axes start at zero where bars
are compared, and text stays text so that a reader can search for it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

COLOURS: Final[dict[str, str]] = {
    "basic": "#9aa0a6", "pe-only": "#e8a33d", "dualpath": "#1a73e8", "split": "#188038",
    "oracle": "#444746", "comparator": "#b06ab3", "layerwise": "#e8a33d",
    "dual path": "#7baaf7", "scheduling": "#1a73e8", "paper": "#d93025",
    "tokenise": "#e8eaf6", "handover": "#188038",
    "schedule": "#c5cae9", "allocate": "#9fa8da", "read": "#1a73e8", "prefill": "#f4b400",
    "model traffic": "#1a73e8", "KV": "#e8a33d",
    "round robin": "#9aa0a6", "scheduler": "#1a73e8", "alternating": "#7baaf7",
    # The prefill side is orange and the decode side blue, as in what reads by one and by both.
    "by prefill nodes": "#e8a33d", "by decode nodes": "#1a73e8",
    "pe0": "#e8a33d", "pe1": "#b06000", "de0": "#1a73e8", "de1": "#7baaf7",
    "measured": "#5f6368", "simulated": "#b06ab3",
}  # fmt: skip
_MORE: Final = ("#1a73e8", "#e8a33d", "#188038", "#b06ab3", "#9aa0a6", "#d93025", "#444746")
_SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.grid.axis": "y", "grid.color": "#e3e5e8", "axes.axisbelow": True,
    "legend.frameon": False, "svg.hashsalt": "dualpath",
}  # fmt: skip
_PANEL_INCHES: Final = (4.2, 2.8)
_LEGEND_COLUMNS: Final = 2
"""Names beside each other per panel: more are wider than it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title, x_label, y_label: text.
        x: positions of a line plot, or names of groups of bars.
        series: values by name, as long as ``x``; None leaves a gap.
        y_limit: upper end of the y axis, None for the data's own.
        marks: horizontal lines by name, for limits and published values.
    """

    title: str
    x_label: str
    y_label: str
    x: Sequence[float | str]
    series: Mapping[str, Sequence[float | None]]
    y_limit: float | None = None
    marks: Mapping[str, float] | None = None


def bars(panels: Sequence[Panel], *, stacked: bool = False) -> str:
    """Panels of grouped (or stacked) bars side by side, as one SVG element.

    Raises:
        ValueError: there is no panel, or a series is not as long as ``x``.
    """
    return _draw(panels, _stacked_bars if stacked else _grouped_bars)


def lines(panels: Sequence[Panel], *, markers: bool = True) -> str:
    """Panels of lines side by side, as one SVG element.

    Raises:
        ValueError: there is no panel, or a series is not as long as ``x``.
    """
    return _draw(panels, _marked_lines if markers else _plain_lines)


def _draw(panels: Sequence[Panel], draw: Any) -> str:
    if not panels:
        raise ValueError("a plot needs at least one panel")
    for panel in panels:
        for name, values in panel.series.items():
            if len(values) != len(panel.x):
                raise ValueError(
                    f"{panel.title}: {name} has {len(values)} values for {len(panel.x)} places"
                )
    with mpl.rc_context(_SETTINGS):
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * len(panels), height + 0.35), layout="constrained")
        names: dict[str, Any] = {}
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels,
                               strict=True):  # fmt: skip
            draw(axes, panel)
            axes.set_title(panel.title, fontsize=10, loc="left")
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            axes.set_ylim(bottom=0, top=panel.y_limit)
            for name, value in (panel.marks or {}).items():
                axes.axhline(value, color=COLOURS["paper"], linewidth=1, linestyle="--", label=name)
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                names.setdefault(name, handle)
        figure.legend(
            names.values(),
            names.keys(),
            loc="outside upper center",
            ncols=min(_LEGEND_COLUMNS * len(panels), len(names)),
        )
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def colour(name: str, index: int) -> str:
    """The colour of a series: its own, or the next free one."""
    return COLOURS.get(name, _MORE[index % len(_MORE)])


def _grouped_bars(axes: Any, panel: Panel) -> None:
    count = max(1, len(panel.series))
    width = 0.8 / count
    for index, (name, values) in enumerate(panel.series.items()):
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(panel.x))]
        shown = [0.0 if value is None else value for value in values]
        axes.bar(places, shown, width * 0.92, label=name, color=colour(name, index))
    axes.set_xticks(range(len(panel.x)), [str(name) for name in panel.x])


def _stacked_bars(axes: Any, panel: Panel) -> None:
    floor = [0.0] * len(panel.x)
    for index, (name, values) in enumerate(panel.series.items()):
        shown = [0.0 if value is None else value for value in values]
        axes.bar(range(len(panel.x)), shown, 0.7, floor, label=name, color=colour(name, index))
        floor = [low + value for low, value in zip(floor, shown, strict=True)]
    axes.set_xticks(range(len(panel.x)), [str(name) for name in panel.x])


def _marked_lines(axes: Any, panel: Panel) -> None:
    _lines(axes, panel, "o")


def _plain_lines(axes: Any, panel: Panel) -> None:
    _lines(axes, panel, "")


def _lines(axes: Any, panel: Panel, marker: str) -> None:
    for index, (name, values) in enumerate(panel.series.items()):
        axes.plot(
            panel.x,
            [float("nan") if value is None else value for value in values],
            marker=marker,
            markersize=4,
            linewidth=1.6,
            label=name,
            color=colour(name, index),
        )
