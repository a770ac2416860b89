"""``dualpath report``: one HTML page from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualpath.cli.common import bad_input
from dualpath.report.lab.results import ResultError
from dualpath.report.lab.sheet import lab_page


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What 'dualpath lab run' wrote.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page [DIR/report.html].")
    ] = None,
) -> None:
    """Write one self-contained HTML page: times, NIC use, paths, simulator against measurement."""
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
