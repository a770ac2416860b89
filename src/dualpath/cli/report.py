"""``dualpath report``: one HTML page from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualpath.cli.common import bad_input
from dualpath.report.lab.markdown import lab_tables
from dualpath.report.lab.results import ResultError
from dualpath.report.lab.sheet import lab_page


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What 'dualpath lab run' wrote.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page [DIR/report.html].")
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown",
            help="Print Markdown tables instead, of DIR's experiment or of all in DIR's folders.",
        ),
    ] = False,
) -> None:
    """Write one self-contained HTML page: times, NIC use, paths, simulator against measurement."""
    if markdown:
        if out is not None:
            bad_input("--out: --markdown prints; name a file with one of the two left out")
        try:
            typer.echo(lab_tables(folder), nl=False)
        except ResultError as error:
            bad_input(str(error))
        return
    target = out or folder / "report.html"
    try:
        text = lab_page(folder)
    except ResultError as error:
        bad_input(str(error))
    try:
        target.write_text(text)
    except OSError as error:
        bad_input(f"--out: {target}: cannot be written: {error.strerror}")
    typer.echo(str(target))
