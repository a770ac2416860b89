"""What several commands share: bad input, the JSON flag, counting along."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")

JsonFlag = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")]

STILL_EVERY_S = 30.0
"""How often a command that says nothing by itself says that it goes on."""
_EVERY: Final = 100
_QUIET_S: Final = 10.0


def bad_input(text: str) -> NoReturn:
    """One line on stderr, exit 2."""
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr that something goes on whose end nobody knows: a spinner on a terminal, a line
    each half minute elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
        return
    over, started_s = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(STILL_EVERY_S):
            line = f"{what}: for {time.monotonic() - started_s:.0f} s so far"
            console.print(line, highlight=False, soft_wrap=True)

    speaker = threading.Thread(target=say, name="dualpath-working", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join(1.0)


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
