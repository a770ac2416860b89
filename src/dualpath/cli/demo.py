"""``dualpath demo``: the whole thing on this machine, checked and compared."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpath.cli import demo_runs
from dualpath.cli.defaults import default_cluster
from dualpath.cli.demo_runs import Stage, ratio, snic_agree, snic_bytes
from dualpath.cli.demo_talks import conversations
from dualpath.cli.replay import replay_progress
from dualpath.cli.signals import stop_on_signal
from dualpath.cli.starting import engine_progress
from dualpath.cli.trace import JsonFlag
from dualpath.config import ConfigError, Mode, parse_rate
from dualpath.engine import models
from dualpath.engine.launch import NoEngine
from dualpath.serve.local import ClusterFailed
from dualpath.serve.ports import NoFreePort
from dualpath.serve.supervise import StartFailed
from dualpath.workload import Comparison, ReplayResult, RequestFailed, compare

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
_SNIC: Final = "40Mbit/s"
_SAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The three runs and what they say about each other."""

    reference: ReplayResult
    basic: ReplayResult
    dualpath: ReplayResult
    tokens: dict[str, Comparison]

    @property
    def tokens_equal(self) -> bool:
        return all(verdict.equal for verdict in self.tokens.values())

    @property
    def snic_agree(self) -> bool:
        return snic_agree(snic_bytes(self.basic), snic_bytes(self.dualpath))

    @property
    def complete(self) -> bool:
        return self.reference.ok and self.basic.ok and self.dualpath.ok

    @property
    def good(self) -> bool:
        return self.complete and self.tokens_equal and self.snic_agree

    def to_json(self) -> dict[str, Any]:
        """The line that scripts read."""
        basic, dual = self.basic.figures, self.dualpath.figures
        return {
            "tokens_equal": self.tokens_equal,
            "snic_agree": self.snic_agree,
            "jct_ratio": ratio(basic.jct_s, dual.jct_s),
            "first_difference": {
                mode: str(verdict.first) if verdict.first else None
                for mode, verdict in self.tokens.items()
            },
            "reference": self.reference.figures.to_json(),
            "basic": basic.to_json(),
            "dualpath": dual.to_json(),
        }


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
    logging.basicConfig(level=logging.WARNING)
    try:
        console.print(f"[bold]1/4[/bold] model {bundled.value}", highlight=False)
        path = models.ensure(bundled)
        with _folder(keep, console) as folder:
            stage = _stage(path, snic, conversations(agents, turns, answer_tokens), folder, console)
            outcome = asyncio.run(_until_stopped(stage, console))
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
        _say_problems(outcome)
        typer.echo(msgspec.json.encode(outcome.to_json()).decode())
    else:
        _show(outcome, snic)
        _say_problems(outcome)
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


async def _until_stopped(stage: Stage, console: Console) -> _Outcome | None:
    """Everything; None when a signal ended it."""
    with stop_on_signal() as stop:
        work = asyncio.create_task(_all_runs(stage, console))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            console.print("stopping ...", highlight=False)
            work.cancel()
            await asyncio.wait([work])
        return None if work.cancelled() else work.result()


async def _all_runs(stage: Stage, console: Console) -> _Outcome:
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
    return _Outcome(plain, basic, dual, verdicts)


@contextmanager
def _folder(keep: bool, console: Console) -> Iterator[Path]:
    """A new folder beside the models: /tmp may be memory, and stores are not small."""
    base = models.cache_dir()
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=base))
    try:
        yield folder
    finally:
        if keep:
            console.print(f"kept: {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _show(outcome: _Outcome, snic: str) -> None:
    console = Console()
    _show_samples(outcome, console)
    table = Table(title=f"1 prefill + 1 decode node, each reads {snic}; {demo_runs.cpu_note()}")
    table.add_column("")
    for name in ("plain vLLM", "basic", "dualpath", "basic / dualpath"):
        table.add_column(name, justify="right")
    plain, basic, dual = (
        run.figures for run in (outcome.reference, outcome.basic, outcome.dualpath)
    )

    def seconds(label: str, *values: float | None) -> None:
        gain = ratio(values[1], values[2])
        shown = [f"{value:.2f} s" if value is not None else "-" for value in values]
        table.add_row(label, *shown, f"{gain:.2f}" if gain else "-")

    seconds("JCT, mean", plain.jct_s, basic.jct_s, dual.jct_s)
    means = [run.ttft_s.mean if run.ttft_s else None for run in (plain, basic, dual)]
    seconds("TTFT, mean", *means)
    seconds("TPOT, mean", plain.tpot_s, basic.tpot_s, dual.tpot_s)
    for node in sorted({*(basic.snic or {}), *(dual.snic or {})}):
        read = [f"{(run.snic or {}).get(node, 0) / 1e6:,.1f} MB" for run in (basic, dual)]
        table.add_row(f"SNIC read, {node}", "", *read, "")
    totals = [snic_bytes(run) for run in (outcome.basic, outcome.dualpath)]
    shown = [f"{total / 1e6:,.1f} MB" if total is not None else "-" for total in totals]
    both = ratio(*totals)
    table.add_row("SNIC read, both", "", *shown, f"{both:.3f}" if both else "-")
    cached = [f"{run.cached_tokens or 0:,} of {run.tokens_in:,}" for run in (plain, basic, dual)]
    table.add_row("prompt tokens hit", *cached, "")
    same = [
        "equal" if outcome.tokens[mode].equal else "DIFFERENT" for mode in ("basic", "dualpath")
    ]
    table.add_row("tokens", f"{plain.tokens_out:,}", *same, "")
    console.print(table)


def _show_samples(outcome: _Outcome, console: Console) -> None:
    last = max((record.round for record in outcome.dualpath.records), default=0)
    for record in outcome.dualpath.records:
        if record.ok and record.round == last and record.agent < _SAMPLES:
            line = f"[{record.name}] {' '.join(record.text.split())}"
            console.print(line, markup=False, highlight=False)


def _say_problems(outcome: _Outcome) -> None:
    for name, run in (
        ("plain vLLM", outcome.reference),
        ("basic", outcome.basic),
        ("dualpath", outcome.dualpath),
    ):
        for record in run.records:
            if not record.ok:
                text = f"{name}: {record.name}, turn {record.round + 1} failed: {record.error}"
                typer.echo(text, err=True)
    for mode, verdict in outcome.tokens.items():
        if verdict.first is not None:
            typer.echo(f"{mode}: tokens differ from plain vLLM's: {verdict.first}", err=True)
    if not outcome.snic_agree:
        basic, dual = snic_bytes(outcome.basic), snic_bytes(outcome.dualpath)
        typer.echo(
            f"the two modes read different amounts from storage: {basic} and {dual} bytes "
            f"(at most {demo_runs.SNIC_TOLERANCE:.0%} apart is right)",
            err=True,
        )
