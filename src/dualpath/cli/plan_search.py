"""The simulations behind ``dualpath plan --nodes``, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualpath.cli.common import bad_input
from dualpath.plan.price import Prices
from dualpath.plan.search import Candidate, divisions, search
from dualpath.plan.simulated import SimulatedTrial, Template
from dualpath.plan.traffic import Node
from dualpath.workload.stats import TraceStats
from dualpath.workload.trace import Trajectory

SIMULATED: Final = {"ds-v3.2": "ds-660b", "ds-27b": "ds-27b", "qwen2.5-32b": "qwen-32b"}
"""Models with calibrated speeds, and the simulator's names of them."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What to try; see the options of ``dualpath plan``."""

    model: str
    mode: str
    node: Node
    nodes: int
    slo_ttft_s: float
    slo_tpot_s: float
    warmup_s: float
    measure_s: float
    seed: int
    prices: Prices | None


def template_of(options: SearchOptions) -> Template:
    """The simulated cluster but for its numbers of nodes.

    Raises:
        typer.Exit: an option makes no sense; said on stderr.
    """
    model = SIMULATED.get(options.model)
    if model is None:
        bad_input(
            f"--nodes: no calibrated speed of {options.model!r} is known; simulated models: "
            f"{', '.join(SIMULATED)}"
        )
    template = Template(model, options.mode, options.node, options.slo_ttft_s, options.slo_tpot_s)
    try:
        template.spec(1, 1)
    except ValueError as error:
        bad_input(str(error))
    return template


def search_divisions(
    options: SearchOptions,
    template: Template,
    trajectories: Sequence[Trajectory],
    stats: TraceStats,
    pair_aps: float,
) -> list[Candidate]:
    """Every division with its capacity.

    Args:
        options: what to try.
        template: of ``template_of``.
        trajectories: what agents do.
        stats: their figures.
        pair_aps: what the storage NICs of two nodes could carry; the search starts below half of
            what those of all nodes could.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(divisions(options.nodes)))

        def running(prefill: int, decode: int, aps: float, done: float) -> None:
            bar.update(task, description=f"{prefill}P{decode}D at {aps:.3g} agents/s: {done:.0%}")

        def divided(done: int, total: int) -> None:
            bar.update(task, completed=done)
            if not console.is_terminal:
                console.print(f"{done} of {total} divisions simulated", highlight=False)

        trial = SimulatedTrial(
            template,
            trajectories,
            stats,
            options.seed,
            options.warmup_s,
            options.measure_s,
            running,
        )
        guess = pair_aps * options.nodes / 5
        return list(search(options.nodes, trial, guess, options.prices, divided))
