"""``dualpath lab run``: experiments on several hosts of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from dualpath.cli.common import JsonFlag, bad_input
from dualpath.cli.lab_show import show_summary
from dualpath.cli.replay import replay_progress
from dualpath.cli.signals import say_stopping, until_stopped
from dualpath.cli.starting import engine_progress
from dualpath.engine import models
from dualpath.engine.launch import NoEngine
from dualpath.lab.experiments import EXPERIMENTS, ISOLATION, Experiment
from dualpath.lab.isolation import RATES, run_isolation
from dualpath.lab.network import FolderError, LabError, check_root
from dualpath.lab.peers import running as peers
from dualpath.lab.removing import NotRemoved
from dualpath.lab.replaying import RunFailed
from dualpath.lab.running import Show, run_experiment
from dualpath.lab.spec import LabSpec
from dualpath.report.lab.results import SUMMARY, ResultError, Summary
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
    until_slo: Annotated[
        bool,
        typer.Option(
            "--until-slo",
            help="online: leave a mode out at rates above one at which mean TTFT or TPOT was over "
            "4 s or 50 ms.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Run EXPERIMENT in a lab of its own and compare the modes. Needs root. What fails is told, and
    the rest is run."""
    if experiment not in _NAMES:
        bad_input(f"EXPERIMENT: expected one of {', '.join(_NAMES)}, got {experiment!r}")
    bundled = models.bundled(model)
    if bundled is None:
        bad_input(f"--model: expected tiny or smollm2, got {model!r}")
    chosen = _OF_CASES.get(experiment)
    if until_slo and (chosen is None or all(case.aps is None for case in chosen.cases)):
        bad_input(f"--until-slo: agents of {experiment} do not arrive at a rate; only 'online' has")
    if chosen is not None and repeats is not None:
        chosen = chosen.with_repeats(repeats)
    snic, cnic = RATES if chosen is None else (chosen.snic_mbit, chosen.cnic_mbit)
    spec = LabSpec(
        model,
        snic_mbit=snic if snic_mbit is None else snic_mbit,
        cnic_mbit=cnic if cnic_mbit is None else cnic_mbit,
    )
    check_root()
    root = (out or Path(f"lab-{experiment}")).absolute()
    try:
        spec = dataclasses.replace(spec, model=str(models.ensure(bundled)))
        summary = asyncio.run(_until_stopped(chosen, spec, root, repeats, until_slo))
    except (ResultError, FolderError) as error:
        bad_input(f"--out: {error}")
    except (
        LabError, NotRemoved, StartFailed, RunFailed, RequestFailed, NoFreePort, NoEngine,
        models.ModelError,
    ) as error:  # fmt: skip
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if summary is None:
        if (root / SUMMARY).exists():
            typer.echo(f"what was measured is in {root}; the same command goes on", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if json:
        typer.echo(msgspec.json.encode(summary.to_json()).decode())
    else:
        show_summary(summary)
        typer.echo(f"page: dualpath report {root}")
    if troubles := _troubles(summary):
        for line in troubles:
            typer.echo(line, err=True)
        raise typer.Exit(EXIT_FAILED)


def _troubles(summary: Summary) -> list[str]:
    """Why this is no success, one line each."""
    found = [f"failed: {failure}" for failure in summary.failures]
    if summary.tokens_equal is False:
        found.append(f"tokens differ: {summary.first_difference}")
    elif summary.experiment != ISOLATION:
        if not summary.cases:
            found.append("no run ended")
        elif summary.tokens_equal is None and not summary.failures:
            found.append("tokens were not compared: no run has an answer that the plain vLLM gave")
    return found


async def _until_stopped(
    experiment: Experiment | None, spec: LabSpec, root: Path, repeats: int | None, until_slo: bool
) -> Summary | None:
    """The experiment, or without one that of isolation; None when a signal ended it."""
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    show = Show(
        lambda title: engine_progress(title, console), lambda title: _replaying(title, console), say
    )
    if experiment is None:
        running = run_isolation(spec, root, repeats, say)
    elif experiment.name == peers.PEERS:
        running = peers.run_peers(experiment, spec, root, show)
    else:
        running = run_experiment(experiment, spec, root, show, until_slo=until_slo)
    return await until_stopped(running, say_stopping(console))


@contextlib.contextmanager
def _replaying(title: str, console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; one line a run elsewhere."""
    if not console.is_terminal:
        console.print(f"{title} ...", highlight=False)
    with replay_progress(title) as progress:
        yield progress
