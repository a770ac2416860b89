"""``dualpath trace convert``: public workload formats to trace files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dualpath.cli.common import JsonFlag, bad_input, counted
from dualpath.cli.trace_show import show_stats
from dualpath.workload.formats.convert import Conversion, Format, Options
from dualpath.workload.formats.messages import CHARS_PER_TOKEN
from dualpath.workload.formats.mooncake import IDLE_S
from dualpath.workload.latency import LATENCY_HELP, parse_latency, with_latency
from dualpath.workload.multiply import multiply
from dualpath.workload.stats import trace_stats
from dualpath.workload.trace import Trajectory, read_trace, write_trace

_FORMATS = ", ".join(form.value for form in Format)


def convert_command(
    source: Annotated[Path, typer.Argument(help="File (.gz or not) or folder of .json files.")],
    out: Annotated[Path, typer.Argument(help="Trace file to write; gzipped if it ends in .gz.")],
    form: Annotated[
        str, typer.Option("--format", help=f"{_FORMATS} [found out from the keys].")
    ] = "",
    blocks: Annotated[
        bool, typer.Option(help="Keep block ids, which say what prompts share.")
    ] = True,
    min_rounds: Annotated[int, typer.Option(min=1, help="Drop shorter trajectories.")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut trajectories before their context gets longer.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    idle: Annotated[
        float,
        typer.Option(
            min=1, help="Request logs: seconds without a request that end a conversation."
        ),
    ] = IDLE_S,
    chars_per_token: Annotated[
        float, typer.Option(min=0.1, help="Texts: characters a token is taken to have.")
    ] = CHARS_PER_TOKEN,
    times: Annotated[
        int, typer.Option(min=1, help="Copies of each trajectory, as the paper multiplies them.")
    ] = 1,
    tool_latency: Annotated[
        str, typer.Option(help=f"Replace the seconds between rounds: {LATENCY_HELP}.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of those seconds.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Turn a public workload into a trace file: sessions of kv-cache-tester, request logs of
    Mooncake and Bailian, ShareGPT conversations, OpenAI messages, or another trace file."""
    if form and form not in {known.value for known in Format}:
        bad_input(f"--format: {form!r} is not one of {_FORMATS}")
    options = Options(
        form=Format(form) if form else None,
        blocks=blocks,
        min_rounds=min_rounds,
        idle_s=idle,
        chars_per_token=chars_per_token,
    )
    last = Conversion(source, options)

    def converted() -> Iterator[Trajectory]:
        nonlocal last
        last = Conversion(source, options)
        made: Iterable[Trajectory] = last
        if max_tokens is not None:
            made = _cut(made, max_tokens, min_rounds)
        yield from islice(made, limit)

    try:
        made = multiply(converted, times)
        if tool_latency:
            latency = parse_latency(tool_latency, seed)
            if latency is not None:
                made = with_latency(made, latency, seed)
        if not write_trace(out, counted(made, "converting")):
            out.unlink(missing_ok=True)
            bad_input(f"{source}: no trajectories are left")
        stats = trace_stats(read_trace(out))
    except OSError as error:
        bad_input(f"{out}: cannot be written: {error.strerror}")
    except ValueError as error:
        bad_input(str(error))
    found = last.form.value if last.form is not None else None
    show_stats(stats, out, json, format=found, dropped=last.dropped, clamped_appends=last.clamped)
    if not json and (last.dropped or last.clamped):
        Console().print(
            f"read as {found}; dropped {last.dropped:,} short ones; {last.clamped:,} appends "
            "taken as 1 token",
            highlight=False,
        )


def _cut(
    trajectories: Iterable[Trajectory], max_tokens: int, min_rounds: int
) -> Iterator[Trajectory]:
    """Drop the round that would cross the limit, and all after it."""
    for trajectory in trajectories:
        kept = trajectory.cut(max_tokens)
        if kept is not None and len(kept.rounds) >= min_rounds:
            yield kept
