"""``dualpath reproduce``: the paper's evaluation on the simulator, ours beside theirs."""

from __future__ import annotations

import json as json_text
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dualpath.cli.trace import bad_input
from dualpath.report.paper.jobs import Job
from dualpath.report.paper.published import Published, UnknownFigure, select
from dualpath.report.paper.reproduce import Reproduction, reproduce
from dualpath.report.paper.sheet import sheet, show, show_error, show_ours, show_tolerance
from dualpath.sim import CALIBRATIONS, MAIN_CALIBRATION, OTHER_CALIBRATION


def reproduce_command(
    what: Annotated[
        str,
        typer.Argument(help="all, a table or figure (table1, figure12), a group, or a row."),
    ] = "all",
    calibration: Annotated[
        str, typer.Option(help=f"Constants of the engines: {', '.join(CALIBRATIONS)}.")
    ] = MAIN_CALIBRATION,
    both: Annotated[
        bool,
        typer.Option(
            "--both", help="Another calibration too, printed beside it: C1; with C1 and C3, C2."
        ),
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Simulations at once [one per processor].")
    ] = os.cpu_count() or 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for reproduction.html, the rows and all plotted series as JSON, and the "
            "results of finished simulations: run again with it to go on where it stopped."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")] = False,
) -> None:
    """Simulate the paper's experiments and print every figure beside the published one.

    All of it is about 33 million simulated rounds under one calibration; a core does 10,000 to
    20,000 a second. Tables 1 and 2 take seconds. A row that misses its tolerance is printed as
    missed; the exit status says only that everything ran.
    """
    if calibration not in CALIBRATIONS:
        bad_input(f"--calibration: {calibration!r} is not one of {', '.join(CALIBRATIONS)}")
    try:
        rows = select(what)
    except UnknownFigure as error:
        bad_input(str(error))
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            bad_input(f"--out: {out}: cannot be made: {error.strerror}")
    names = [calibration, *([OTHER_CALIBRATION[calibration]] if both else [])]
    runs = [_run(rows, name, jobs, out) for name in names]
    main, other = runs[0], runs[1] if len(runs) > 1 else None
    if out is not None:
        _write(out, runs, sheet(main, other))
    if json:
        answer = main.to_json()
        if other is not None:
            answer["other"] = other.to_json()
        typer.echo(json_text.dumps(answer))
        return
    _print(main, other)
    if out is not None:
        typer.echo(f"page: {out / 'reproduction.html'}")


def _run(
    rows: tuple[Published, ...], calibration: str, workers: int, out: Path | None
) -> Reproduction:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(f"{calibration}: simulating", total=1)

        def done(job: Job, finished: int, total: int) -> None:
            progress.update(task, completed=finished, total=total, description=job.label)
            if not console.is_terminal:
                console.print(f"{finished}/{total} {job.label}", soft_wrap=True)

        cache = None if out is None else out / "simulations.jsonl"
        found = reproduce(rows, calibration, workers=workers, cache=cache, progress=done)
        progress.update(task, completed=1, total=1)
    return found


def _write(out: Path, runs: list[Reproduction], html: str) -> None:
    """Each file whole or not at all, so that an interrupt leaves no half page."""
    files = {"reproduction.html": html}
    for run in runs:
        whole = {**run.to_json(), "series": run.series}
        files[f"reproduction-{run.calibration}.json"] = json_text.dumps(whole, indent=1) + "\n"
    for name, text in files.items():
        partial = out / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(out / name)


def _print(main: Reproduction, other: Reproduction | None) -> None:
    # Units are on the page and in --json: here they would leave the figures no room.
    table = Table(title=f"{main.calibration}: {main.met} of {len(main.rows)} rows within tolerance")
    table.add_column("row", no_wrap=True)
    for name in ("paper", "ours", "error", "limit", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    if other is not None:
        table.add_column(other.calibration, justify="right", no_wrap=True)
    others = {} if other is None else {row.name: row for row in other.rows}
    for row in main.rows:
        beside = []
        if other is not None:
            colour = "green" if others[row.name].met else "red"
            beside.append(f"[{colour}]{show_ours(others[row.name])}[/]")
        table.add_row(
            row.name,
            show(row.paper),
            show_ours(row),
            show_error(row),
            show_tolerance(row),
            _met(row.met),
            *beside,
        )
    console = Console()
    console.print(table)
    # Under the table: beside it they would leave the figures no room on a terminal.
    for note, names in _notes(main).items():
        console.print(f"[bold]{', '.join(names)}[/]: {note}", highlight=False, soft_wrap=False)


def _notes(run: Reproduction) -> dict[str, list[str]]:
    """Rows by their note, rows with the same one together."""
    notes: dict[str, list[str]] = {}
    for row in run.rows:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
    return notes


def _met(met: bool) -> str:
    return "[green]met[/]" if met else "[red]missed[/]"
