"""What several commands share: bad input, the JSON flag, counting along."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")

JsonFlag = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")]

_EVERY: Final = 100
_QUIET_S: Final = 10.0


def bad_input(text: str) -> NoReturn:
    """One line on stderr, exit 2."""
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(2)


def counted(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, with a running count on stderr: a spinner on a terminal, a line every ten seconds
    elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    said_s = time.monotonic()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        for count, item in enumerate(items, 1):
            if count % _EVERY == 0:
                bar.update(task, description=f"{what}: {count:,}")
                if not console.is_terminal and time.monotonic() - said_s > _QUIET_S:
                    said_s = time.monotonic()
                    console.print(f"{what}: {count:,}", highlight=False)
            yield item
