"""``dualpath demo``: the whole thing on this machine, checked and compared."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from dualpath.cli import demo_runs
from dualpath.cli.defaults import default_cluster
from dualpath.cli.demo_runs import Stage
from dualpath.cli.demo_table import Outcome, say_problems, show
from dualpath.cli.demo_talks import conversations
from dualpath.cli.replay import replay_progress
from dualpath.cli.signals import say_stopping, until_stopped
from dualpath.cli.starting import engine_progress
from dualpath.cli.trace import JsonFlag
from dualpath.config import ConfigError, Mode, parse_rate
from dualpath.engine import models
from dualpath.engine.launch import NoEngine
from dualpath.engine.model_files import check_folder
from dualpath.serve.local import ClusterFailed
from dualpath.serve.ports import NoFreePort
from dualpath.serve.supervise import StartFailed
from dualpath.workload import (
    Conversation,
    RequestFailed,
    compare,
)

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
_SNIC: Final = "40Mbit/s"
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def demo_command(
    agents: Annotated[int, typer.Option(min=1, help="Agents that chat at the same time.")] = 4,
    turns: Annotated[int, typer.Option(min=2, help="Questions each one asks.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 40,
    snic: Annotated[str, typer.Option(help="What each node may read from storage.")] = _SNIC,
    model: Annotated[str, typer.Option(help="'smollm2' or 'tiny'.")] = "smollm2",
    keep: Annotated[bool, typer.Option("--keep", help="Keep stores, logs and records.")] = False,
    json: JsonFlag = False,
) -> None:
    """Serve agents with a real model over both read paths, check every token against a plain vLLM,
    and compare. Takes less than ten minutes on two cores."""
    console = Console(stderr=True)
    bundled = models.bundled(model)
    if bundled is None:
        raise ConfigError(f"--model: expected smollm2 or tiny, got {model!r}")
    try:
        parse_rate(snic)
    except ValueError as error:
        raise ConfigError(f"--snic: {error}") from None
    talks = conversations(agents, turns, answer_tokens)
    try:
        console.print(f"[bold]1/4[/bold] model {bundled.value}", highlight=False)
        path = models.ensure(bundled)
        check_folder(path, field="--model")
        with _folder(keep, console) as (folder, keep_it):
            logging.basicConfig(filename=folder / "demo.log", level=logging.INFO, format=_FORMAT)
            stage = _stage(path, snic, talks, folder, console)
            outcome = asyncio.run(_until_stopped(stage, console))
            if outcome is not None and not outcome.good:
                keep_it()
    except (
        StartFailed,
        ClusterFailed,
        NoFreePort,
        NoEngine,
        models.ModelError,
        RequestFailed,
    ) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if outcome is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    if json:
        say_problems(outcome)
        typer.echo(msgspec.json.encode(outcome.to_json()).decode())
    else:
        show(outcome, talks, snic)
        say_problems(outcome)
    if not outcome.good:
        raise typer.Exit(EXIT_FAILED)


def _stage(
    model: Path, snic: str, talks: list[Conversation], folder: Path, console: Console
) -> Stage:
    config = default_cluster(
        model,
        mode=Mode.DUALPATH,
        prefill=1,
        decode=1,
        store=folder / "store",
        port=0,
        # Only reads are limited: they are what the two modes share out differently. A limit on
        # writes would add the same time to both.
        snic={"read": snic},
        # All agents' reads queue at one NIC of a few MB/s; that is slow, not broken.
        timeouts={"storage": "300s", "admission": "300s"},
    )
    return Stage(
        config, talks, folder,
        starting=lambda title: engine_progress(title, console),
        replaying=replay_progress,
    )  # fmt: skip


async def _until_stopped(stage: Stage, console: Console) -> Outcome | None:
    """Everything; None when a signal ended it."""
    return await until_stopped(_all_runs(stage, console), say_stopping(console))


async def _all_runs(stage: Stage, console: Console) -> Outcome:
    def step(number: int, text: str) -> None:
        console.print(f"[bold]{number}/4[/bold] {text}", highlight=False)

    step(2, "the same conversations on one plain vLLM, whose tokens are the right ones")
    plain = await demo_runs.reference(stage)
    step(3, "basic: only the prefill node reads from storage")
    basic = await demo_runs.run_mode(stage, Mode.BASIC)
    step(4, "dualpath: both nodes read from storage")
    dual = await demo_runs.run_mode(stage, Mode.DUALPATH)
    verdicts = {
        mode.value: compare(plain.records, result.records)
        for mode, result in ((Mode.BASIC, basic), (Mode.DUALPATH, dual))
    }
    return Outcome(plain, basic, dual, verdicts)


@contextmanager
def _folder(keep: bool, console: Console) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A new folder beside the models (/tmp may be memory, and stores are not small), and what to
    call to keep it. After an error it is kept too: its logs tell more."""
    base = models.cache_dir()
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=base))

    def keep_it() -> None:
        nonlocal keep
        keep = True

    try:
        yield folder, keep_it
    except Exception:  # whatever went wrong goes on to the caller
        keep = True
        raise
    finally:
        if keep:
            console.print(f"kept: {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
