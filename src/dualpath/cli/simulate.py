"""``dualpath simulate``: run agents through a simulated cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dualpath.cli.common import JsonFlag, bad_input
from dualpath.cli.simulate_live import cluster_spec, is_cluster
from dualpath.cli.simulate_trouble import with_trouble
from dualpath.sim import (
    CALIBRATIONS,
    MAIN_CALIBRATION,
    MODELS,
    MODES,
    SimResult,
    SimSpec,
    preset,
    simulate,
)
from dualpath.sim.files import read_spec, write_result
from dualpath.sim.run import DEFAULT_MEASURE_S, DEFAULT_WARMUP_S
from dualpath.timeline import Timeline
from dualpath.workload.measure import Spread
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Trajectory, read_trace

DEFAULT_PRESET: Final = "ds-660b-2p4d"
DEFAULT_AGENTS: Final = 256


def simulate_command(
    preset_name: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="MODEL-PpDd: a model of the paper on P prefill and D decode nodes; MODEL is "
            f"{', '.join(MODELS)} [{DEFAULT_PRESET}].",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML description of another one (docs/simulator.md), or a live cluster's file."
        ),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="With a live cluster's file: what was measured on it, such as decode_step_s=0.02 "
            "(docs/simulator.md has the names).",
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODES)} [dualpath, or the config's].")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help=f"Constants of a preset: {', '.join(CALIBRATIONS)} [{MAIN_CALIBRATION}]."
        ),
    ] = None,
    trace: Annotated[
        str, typer.Option(help=f"Trace file, or a row of the paper's Table 2: {', '.join(ROWS)}.")
    ] = "64k",
    agents: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Agents that start at once [{DEFAULT_AGENTS}]; with --aps: that arrive."
        ),
    ] = None,
    aps: Annotated[
        float | None,
        typer.Option(
            help="Agents arriving a second, Poisson; without --agents until it is steady."
        ),
    ] = None,
    warmup: Annotated[
        float, typer.Option(min=0, help="Seconds before a steady run is measured.")
    ] = DEFAULT_WARMUP_S,
    measure: Annotated[
        float, typer.Option(min=1, help="Seconds for which it is.")
    ] = DEFAULT_MEASURE_S,
    until_steady: Annotated[
        bool,
        typer.Option(
            help="End an online run by the published rule instead: when the TTFT is above its "
            "limit, or within 5 % of what it was 30 minutes before (150 s windows)."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=FACTOR", help="GPUs of a node (pe0, de1) this much slower."),
    ] = None,
    slow_snic: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=FACTOR", help="Storage NIC of a node this much slower."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE@SECOND", help="A node dies then; its requests are sent again."),
    ] = None,
    roles: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Nodes change between prefill and decode with the load; a change takes draining "
            "and this long.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for result.json and Parquet files.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a timeline that opens in ui.perfetto.dev.")
    ] = None,
    decision_log: Annotated[
        Path | None, typer.Option(help="Write the scheduler's decisions, as the front does.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Simulate agents on a cluster: JCT, TTFT, TTST, TPOT, bytes per NIC, balance.

    The scheduler is the one that the front runs; computation, NICs, buffers and memory are
    modelled (docs/simulator.md).
    """
    try:
        spec = with_trouble(
            _spec(preset_name, config, mode, calibration, cost or ()),
            straggler or (), slow_snic or (), fail or (), roles,
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            perfetto = None if timeline is None else stack.enter_context(Timeline(timeline))
            log = None
            if decision_log is not None:
                lines = stack.enter_context(decision_log.open("w", encoding="utf-8"))
                log = _line_writer(lines.write)
            progress = stack.enter_context(
                _progress(f"{spec.name or 'cluster'} {spec.features.name}")
            )
            result = simulate(
                spec,
                _trajectories(trace),
                agents=DEFAULT_AGENTS if agents is None and aps is None else agents,
                aps=aps,
                seed=seed,
                warmup_s=warmup,
                measure_s=measure,
                until_steady=until_steady,
                progress=progress,
                timeline=perfetto,
                decision_log=log,
            )
        written = [] if out is None else write_result(result, out)
    except ModuleNotFoundError as error:
        bad_input(f"--out: {error.name} is missing: pip install 'dualpath[sim]'")
    except OSError as error:
        bad_input(f"{error.filename}: cannot be written: {error.strerror}")
    except ValueError as error:
        bad_input(str(error))
    if json:
        typer.echo(msgspec.json.encode(result.to_json()).decode())
        return
    _show(result)
    for path in written:
        typer.echo(str(path))


def _spec(
    name: str | None,
    config: Path | None,
    mode: str | None,
    calibration: str | None,
    costs: Sequence[str],
) -> SimSpec:
    live = config is not None and is_cluster(config)
    if costs and not live:
        raise ValueError("--cost: has a meaning only with --config of a live cluster")
    if config is None:
        chosen = calibration or MAIN_CALIBRATION
        return preset(name or DEFAULT_PRESET, mode or "dualpath", chosen)
    if name is not None or calibration is not None:
        option = "--preset" if name is not None else "--calibration"
        raise ValueError(f"{option}: has no meaning with --config: write it into the file")
    if live:
        return cluster_spec(config, mode, costs)
    spec = read_spec(config)
    return spec if mode is None else spec.with_mode(mode)


def _trajectories(trace: str) -> Iterator[Trajectory]:
    return synthesise(ROWS[trace]) if trace in ROWS else read_trace(trace)


def _line_writer(write: Callable[[str], object]) -> Callable[[str], object]:
    return lambda line: write(line + "\n")


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=1.0)

        def report(part: float, now_s: float) -> None:
            bar.update(task, completed=part, description=f"{title}, second {now_s:,.0f}")

        yield report


def _show(result: SimResult) -> None:
    console = Console()
    table = Table(title=f"{result.name} {result.mode}: {result.requests:,} requests")
    for name in ("seconds", "mean", "p50", "p99"):
        table.add_column(name, justify="left" if name == "seconds" else "right")
    rows: list[tuple[str, Spread | None]] = [
        ("JCT", result.jct), ("TTFT", result.ttft),
        *((f"  {name}", part) for name, part in result.ttft_split.items()),
        ("TTST", result.ttst), ("TPOT", result.tpot),
    ]  # fmt: skip
    for name, spread in rows:
        if spread is not None:
            table.add_row(name, *(f"{v:,.3f}" for v in (spread.mean, spread.p50, spread.p99)))
    console.print(table)
    hits = result.hit_tokens / result.tokens_in if result.tokens_in else 0.0
    console.print(
        f"{result.agents_done} of {result.agents} agents done in {result.duration_s:,.0f} s, "
        f"{result.failed} failed; tokens in {result.tokens_in:,} ({hits:.1%} hits), out "
        f"{result.tokens_out:,}",
        highlight=False,
    )
    paths = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in result.path.items())
    console.print(f"hit bytes by path, GB: {paths}", highlight=False)
    if result.snic_max_over_mean is not None:
        console.print(
            f"busiest SNIC over the mean one: {result.snic_max_over_mean:.2f}", highlight=False
        )
    for at_s, node, role in result.role_switches:
        console.print(f"second {at_s:,.0f}: {node} is a {role} node")
    if result.overloaded:
        console.print("given up: this arrival rate cannot be served", style="bold red")
    elif result.slo_met is not None:
        console.print(f"SLO {'met' if result.slo_met else 'missed'}")
