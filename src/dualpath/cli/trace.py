"""``dualpath trace``: make and look at workload files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpath.workload.stats import TraceStats, trace_stats
from dualpath.workload.synth import (
    PAPER_SEED,
    PAPER_TRAJECTORIES,
    ROWS,
    regular,
    synthesise,
    with_tool_latency,
)
from dualpath.workload.trace import TraceError, Trajectory, read_trace, write_trace

trace_app = typer.Typer(
    no_args_is_help=True,
    help="Make and look at workload files.",
    rich_markup_mode=None,  # it would swallow the defaults, which stand in square brackets
)

JsonFlag = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")]


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
    tool_latency: Annotated[
        float, typer.Option(min=0, help="Median seconds between rounds, log-normal; 0 for none.")
    ] = 0.0,
    tool_sigma: Annotated[float, typer.Option(min=0, help="Its sigma.")] = 1.2,
    seed: Annotated[int, typer.Option(help="Same seed, same file.")] = PAPER_SEED,
    json: JsonFlag = False,
) -> None:
    """Write a workload: a row of the paper's Table 2 (--row), or agents that all do the same."""
    plain = {"--turns": turns, "--append": append, "--gen": gen, "--first-append": first_append}
    made: Iterator[Trajectory]
    if row is not None:
        if row not in ROWS:
            bad_input(f"--row: {row!r} is not one of {', '.join(ROWS)}")
        if extra := [name for name, value in plain.items() if value is not None]:
            bad_input(f"{extra[0]}: has no meaning with --row")
        made = synthesise(ROWS[row], PAPER_TRAJECTORIES if agents is None else agents, seed)
    else:
        shape = (4 if agents is None else agents, _or(turns, 3), _or(append, 200), _or(gen, 32))
        made = regular(*shape, first_append or 0)
    if tool_latency:
        made = with_tool_latency(made, tool_latency, tool_sigma, seed)
    try:
        write_trace(out, made)
        _show(trace_stats(read_trace(out)), out, json)
    except OSError as error:
        bad_input(f"{out}: cannot be written: {error.strerror}")
    except ValueError as error:
        bad_input(str(error))


@trace_app.command()
def stats(
    trace: Annotated[Path, typer.Argument(help="Trace file, .gz or not.")], json: JsonFlag = False
) -> None:
    """Print what a trace asks for: Table 2's columns under both readings, and more."""
    try:
        _show(trace_stats(read_trace(trace)), trace, json)
    except TraceError as error:
        bad_input(str(error))


def bad_input(text: str) -> NoReturn:
    """One line on stderr, exit 2."""
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(2)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _show(figures: TraceStats, path: Path, as_json: bool) -> None:
    if as_json:
        line = {"path": str(path), **figures.to_json()}
        typer.echo(msgspec.json.encode(line).decode())
        return
    table = Table(title=f"{path}: {figures.trajectories} trajectories, {figures.requests} requests")
    for name in ("reading", "turns", "append", "gen", "total", "mean context"):
        table.add_column(name, justify="left" if name == "reading" else "right")
    for name, reading in (("per trajectory", figures.macro), ("per request", figures.request)):
        means = (figures.turns, reading.append, reading.gen, figures.total, reading.context)
        table.add_row(name, *(f"{mean:,.1f}" for mean in means))
    console = Console()
    console.print(table)
    latency = figures.tool_latency_s
    console.print(
        f"tokens in {figures.tokens_in:,}, out {figures.tokens_out:,}; longest context "
        f"{figures.max_context:,}; hit ratio of an unbounded cache {figures.hit_ratio:.1%}; "
        f"mean tool latency {'unknown' if latency is None else f'{latency:.1f} s'}"
    )
