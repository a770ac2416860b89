"""``dualpath lab run``: experiments on several hosts of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpath.cli.common import JsonFlag, bad_input
from dualpath.cli.replay import replay_progress
from dualpath.cli.signals import say_stopping, until_stopped
from dualpath.cli.starting import engine_progress
from dualpath.engine import models
from dualpath.engine.launch import NoEngine
from dualpath.lab.experiments import EXPERIMENTS, ISOLATION, Experiment
from dualpath.lab.isolation import RATES, run_isolation
from dualpath.lab.network import LabError, check_root
from dualpath.lab.peers import running as peers
from dualpath.lab.peers.packages import NotInstalled
from dualpath.lab.removing import NotRemoved
from dualpath.lab.replaying import RunFailed
from dualpath.lab.running import Show, run_experiment
from dualpath.lab.spec import LabSpec
from dualpath.report.lab.results import Check, IsolationResult, ResultError, Summary
from dualpath.serve.ports import NoFreePort
from dualpath.serve.supervise import StartFailed
from dualpath.workload import Progress, RequestFailed

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
_OF_CASES: Final = {**EXPERIMENTS, peers.PEERS: peers.EXPERIMENT}
_NAMES: Final = (*_OF_CASES, ISOLATION)


def lab_run_command(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help=", ".join(_NAMES) + ".")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Results; what is there is not run again [lab-EXPERIMENT]."
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Runs of every mode [the experiment's].")
    ] = None,
    model: Annotated[str, typer.Option(help="'tiny' or 'smollm2'.")] = "tiny",
    snic_mbit: Annotated[
        float | None, typer.Option(help="Storage NIC of a node, Mbit/s [the experiment's].")
    ] = None,
    cnic_mbit: Annotated[
        float | None, typer.Option(help="Compute NIC of a node, Mbit/s [the experiment's].")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Run EXPERIMENT in a lab of its own and compare the modes. Needs root."""
    if experiment not in _NAMES:
        bad_input(f"EXPERIMENT: expected one of {', '.join(_NAMES)}, got {experiment!r}")
    bundled = models.bundled(model)
    if bundled is None:
        bad_input(f"--model: expected tiny or smollm2, got {model!r}")
    chosen = _OF_CASES.get(experiment)
    if chosen is not None and repeats is not None:
        chosen = chosen.with_repeats(repeats)
    check_root()
    root = (out or Path(f"lab-{experiment}")).absolute()
    try:
        path = models.ensure(bundled)
        rates = RATES if chosen is None else (chosen.snic_mbit, chosen.cnic_mbit)
        spec = LabSpec(str(path), snic_mbit=snic_mbit or rates[0], cnic_mbit=cnic_mbit or rates[1])
        summary = asyncio.run(_until_stopped(chosen, spec, root, repeats))
    except ResultError as error:
        bad_input(f"--out: {error}")
    except (
        LabError, NotRemoved, StartFailed, RunFailed, RequestFailed, NoFreePort, NoEngine,
        NotInstalled, models.ModelError,
    ) as error:  # fmt: skip
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if summary is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    if json:
        typer.echo(msgspec.json.encode(summary.to_json()).decode())
    else:
        _show(summary)
        typer.echo(f"page: dualpath report {root}")
    if summary.cases and not summary.tokens_equal:
        typer.echo(f"tokens differ: {summary.first_difference}", err=True)
        raise typer.Exit(EXIT_FAILED)


async def _until_stopped(
    experiment: Experiment | None, spec: LabSpec, root: Path, repeats: int | None
) -> Summary | None:
    """The experiment, or without one that of isolation; None when a signal ended it."""
    console = Console(stderr=True)
    show = Show(
        lambda title: engine_progress(title, console), lambda title: _replaying(title, console)
    )
    if experiment is None:
        running = run_isolation(spec, root, repeats, console.print)
    elif experiment.name == peers.PEERS:
        running = peers.run_peers(experiment, spec, root, show)
    else:
        running = run_experiment(experiment, spec, root, show)
    return await until_stopped(running, say_stopping(console))


@contextlib.contextmanager
def _replaying(title: str, console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; one line a run elsewhere."""
    if not console.is_terminal:
        console.print(f"{title} ...", highlight=False)
    with replay_progress(title) as progress:
        yield progress


def _show(summary: Summary) -> None:
    console = Console()
    table = Table(title=f"{summary.title}; {summary.machine}")
    for name in ("case", "mode", "JCT", "sooner", "TTFT", "TPOT", "simulated", "error"):
        table.add_column(name, justify="left" if name in ("case", "mode") else "right")
    for case in summary.cases:
        for name, one in case.variants.items():
            figures, guess = one.run.figures, one.prediction
            table.add_row(
                case.name,
                name,
                _seconds(figures["jct_s"]),
                f"{case.speedup[name]:.2f}",
                _seconds((figures["ttft_s"] or {}).get("mean")),
                _seconds(figures["tpot_s"]),
                _seconds(guess.jct_s if guess else None),
                f"{guess.error:+.0%}" if guess else "-",
            )
    if summary.cases:
        console.print(table)
    if summary.isolation:
        console.print(_isolation(summary.isolation))
    checks = Table(title="targets")
    for name in ("figure", "measured", "target", ""):
        checks.add_column(name, justify="left" if name == "figure" else "right")
    for where, check in _checks(summary):
        checks.add_row(
            f"{where} {check.name}",
            "-" if check.value is None else f"{check.value:.3g}",
            f"{'<=' if check.at_most else '>='} {check.target:.3g}",
            "met" if check.met else "missed",
        )
    console.print(checks)


def _isolation(results: list[IsolationResult]) -> Table:
    table = Table(title="all-reduces of model traffic beside KV")
    for name in ("KV", "Mbit/s", "p50", "p99", "KV Mbit/s"):
        table.add_column(name, justify="left" if name == "KV" else "right")
    for one in results:
        rates = [f"{rate * 8e-6:.1f}" for rate in (one.bytes_per_s, one.kv_bytes_per_s)]
        table.add_row(one.name, rates[0], _seconds(one.p50_s), _seconds(one.p99_s), rates[1])
    return table


def _checks(summary: Summary) -> list[tuple[str, Check]]:
    return [
        *((case.name, check) for case in summary.cases for check in case.checks),
        *((ISOLATION, check) for check in summary.isolation_checks),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
