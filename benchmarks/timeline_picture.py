"""A picture of one step of a prefill engine, out of a timeline: what loading hides behind.

``timeline_picture.py ALL.trace.json OUT.svg`` draws the step with the most loading, or the one that
holds the moment ``--at`` (seconds after the beginning). Made for docs/layerwise.md; the file is one
of ``benchmarks/layerwise.py --keep`` or of ``dualpath timeline``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from layerwise import pe_spans

Span = tuple[str, str, float, float]
ROWS = ("waiting", "computing", "load", "export", "push")
COLOURS = {
    "waiting": "#c0392b", "computing": "#4a6fa5", "load": "#e8a33d", "export": "#6aa84f",
    "push": "#8e63a8",
}  # fmt: skip


def steps(spans: list[Span]) -> list[tuple[float, float]]:
    """Begin and end of every step: from computing layer 0 to the next layer 0."""
    computing = sorted((start, start + taken, name) for track, name, start, taken in spans
                       if track == "computing")  # fmt: skip
    begins = [index for index, span in enumerate(computing) if span[2] == "layer 0"]
    ends = [*begins[1:], len(computing)]
    return [
        (computing[first][0], computing[last - 1][1])
        for first, last in zip(begins, ends, strict=True)
        if last > first
    ]


def loading(spans: list[Span], step: tuple[float, float]) -> float:
    """Seconds of loads that begin in a step."""
    return sum(
        taken for track, _, start, taken in spans
        if track.startswith("load") and step[0] <= start < step[1]
    )  # fmt: skip


def draw(spans: list[Span], step: tuple[float, float], target: Path) -> None:
    """Each kind on a row; neighbours in two shades, so that layers can be told apart."""
    begin = step[0] - 0.04 * (step[1] - step[0])
    end = step[1] + 0.02 * (step[1] - step[0])
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for track, name, start, taken in spans:
        kind = track.split()[0]
        if kind not in ROWS or start + taken < begin or start > end:
            continue
        layer = name.split()[-1]
        shade = 1.0 if not layer.isdigit() or int(layer) % 2 else 0.6
        axes.broken_barh(
            [(1e3 * (start - step[0]), 1e3 * taken)], (ROWS.index(kind) - 0.38, 0.76),
            facecolors=COLOURS[kind], alpha=shade, linewidth=0,
        )  # fmt: skip
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.set_ylim(len(ROWS) - 0.5, -0.5)
    axes.set_xlim(1e3 * (begin - step[0]), 1e3 * (end - step[0]))
    axes.set_xlabel("ms since the model began layer 0")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Choose a step and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("timeline", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--at", type=float, help="seconds after the beginning")
    options = parser.parse_args()
    spans = pe_spans(options.timeline)
    found = steps(spans)
    if not found:
        raise SystemExit(f"error: {options.timeline}: no prefill step in it")
    if options.at is None:
        step = max(found, key=lambda step: loading(spans, step))
    else:
        step = next((step for step in found if step[0] <= options.at < step[1]), found[-1])
    draw(spans, step, options.target)


if __name__ == "__main__":
    main()
