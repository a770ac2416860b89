"""``dualpath trace``: make, convert and look at workload files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dualpath.cli.common import JsonFlag as JsonFlag
from dualpath.cli.common import bad_input as bad_input
from dualpath.cli.common import counted
from dualpath.cli.trace_convert import convert_command
from dualpath.cli.trace_show import show_stats
from dualpath.model import PRESETS, UnsupportedModel, cost_from_config_json, preset_cost
from dualpath.workload.blocks import Sharing
from dualpath.workload.latency import LATENCY_HELP, parse_latency, with_latency
from dualpath.workload.multiply import multiply
from dualpath.workload.stats import trace_stats
from dualpath.workload.synth import (
    PAPER_TRAJECTORIES,
    ROWS,
    regular,
    synthesise,
)
from dualpath.workload.trace import TraceError, Trajectory, read_trace, write_trace
from dualpath.workload.workingset import Service, working_set

trace_app = typer.Typer(
    no_args_is_help=True,
    help="Make, convert and look at workload files.",
    rich_markup_mode=None,  # it would swallow the defaults, which stand in square brackets
)
trace_app.command("convert")(convert_command)


@trace_app.command()
def synth(
    out: Annotated[Path, typer.Argument(help="File to write; gzipped when it ends in .gz.")],
    row: Annotated[
        str | None, typer.Option(help=f"Row of the paper's Table 2: {', '.join(ROWS)}.")
    ] = None,
    agents: Annotated[
        int | None, typer.Option(min=1, help="Trajectories [500 for a row, else 4].")
    ] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Rounds of each agent.")] = None,
    append: Annotated[int | None, typer.Option(min=0, help="Tokens each round adds.")] = None,
    gen: Annotated[int | None, typer.Option(min=0, help="Tokens each round generates.")] = None,
    first_append: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the first prompt [same as --append].")
    ] = None,
    times: Annotated[
        int, typer.Option(min=1, help="Copies of each, as the paper multiplies trajectories.")
    ] = 1,
    tool_latency: Annotated[
        str,
        typer.Option(
            help=f"Seconds between rounds: a number (median of a log-normal), {LATENCY_HELP}; "
            "0 for none."
        ),
    ] = "0",
    tool_sigma: Annotated[
        float, typer.Option(min=0, help="Sigma of the log-normal when a number is given.")
    ] = 1.2,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same file.",
            show_default="the row's own, whose draw comes nearest to the table",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Write a workload: a row of the paper's Table 2 (--row), or agents that all do the same."""
    plain = {"--turns": turns, "--append": append, "--gen": gen, "--first-append": first_append}
    if row is not None:
        if row not in ROWS:
            bad_input(f"--row: {row!r} is not one of {', '.join(ROWS)}")
        if extra := [name for name, value in plain.items() if value is not None]:
            bad_input(f"{extra[0]}: has no meaning with --row")

    if seed is None:
        seed = ROWS[row].seed if row is not None else 0

    def source() -> Iterator[Trajectory]:
        if row is not None:
            return synthesise(ROWS[row], PAPER_TRAJECTORIES if agents is None else agents, seed)
        shape = (4 if agents is None else agents, _or(turns, 3), _or(append, 200), _or(gen, 32))
        if not (first_append or shape[2]):
            bad_input("--append: must be at least 1 where --first-append is not given, got 0")
        return regular(*shape, first_append or 0)

    try:
        latency = parse_latency(tool_latency, seed, tool_sigma)
        made = multiply(source, times)
        if latency is not None:
            made = with_latency(made, latency, seed)
        write_trace(out, counted(made, "writing"))
        show_stats(trace_stats(read_trace(out)), out, json)
    except OSError as error:
        bad_input(f"{out}: cannot be written: {error.strerror}")
    except ValueError as error:
        text = str(error)
        bad_input(f"--tool-{text}" if text.startswith("latency:") else text)


@trace_app.command()
def stats(
    trace: Annotated[Path, typer.Argument(help="Trace file, .gz or not.")],
    sharing: Annotated[
        bool,
        typer.Option(
            "--sharing",
            help="Count hits on other trajectories' blocks too, where the trace has block ids.",
        ),
    ] = False,
    aps: Annotated[
        float | None, typer.Option(help="Agents arriving a second: adds the working set.")
    ] = None,
    ttft: Annotated[float, typer.Option(min=0, help="TTFT at that load, s.")] = 1.7,
    tpot: Annotated[float, typer.Option(min=0, help="TPOT at that load, s.")] = 0.04,
    model: Annotated[
        str, typer.Option(help=f"For its bytes: {', '.join(PRESETS)} or a config.json.")
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Print what a trace asks for: Table 2's columns under both readings, and more."""
    try:
        shared = Sharing() if sharing else None
        figures = trace_stats(counted(_fed(read_trace(trace), shared), "reading"))
        working = None
        if aps is not None:
            working = working_set(counted(read_trace(trace), "reading"), Service(ttft, tpot), aps)
        show_stats(
            figures,
            trace,
            json,
            sharing=shared,
            working=working,
            kv_bytes_per_token=_kv_bytes(model) if model else None,
        )
    except TraceError as error:
        bad_input(str(error))
    except UnsupportedModel as error:
        bad_input(f"--model: {error}")
    except ValueError as error:
        bad_input(f"--{error}")


def _fed(trajectories: Iterator[Trajectory], shared: Sharing | None) -> Iterator[Trajectory]:
    for trajectory in trajectories:
        if shared is not None:
            shared.feed(trajectory)
        yield trajectory


def _kv_bytes(model: str) -> int:
    cost = preset_cost(model) if model in PRESETS else cost_from_config_json(model)
    return cost.kv_bytes_per_token


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
