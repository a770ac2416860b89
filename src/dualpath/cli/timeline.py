"""``dualpath timeline``: one Perfetto file out of a run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dualpath.config import ConfigError
from dualpath.spans import merge


def timeline_command(
    folder: Annotated[Path, typer.Argument(help="Folder named by log.timeline in the run.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; .gz compresses [FOLDER/timeline.json.gz].")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, last on stdout.")
    ] = False,
) -> None:
    """Merge what the front and the engines of a run drew, for ui.perfetto.dev.

    The cluster file's log.timeline names a folder; every process writes a file into it. Their times
    are those of the machines' clocks.
    """
    target = out or folder / "timeline.json.gz"
    try:
        count = merge(folder, target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"timeline: {error}") from None
    if as_json:
        typer.echo(json.dumps({"file": str(target), "events": count}))
    else:
        typer.echo(f"{count} events in {target}: open it at https://ui.perfetto.dev")
