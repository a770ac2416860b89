"""``dualpath lab``: several hosts on this machine, with real NIC limits."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop
from rich.console import Console

from dualpath.cli.common import bad_input
from dualpath.cli.lab_run import lab_run_command
from dualpath.cli.signals import say_stopping, until_stopped
from dualpath.cli.starting import engine_progress
from dualpath.config import Mode
from dualpath.engine import models
from dualpath.engine.model_files import check_model
from dualpath.lab import claim
from dualpath.lab.cluster import lab_cluster
from dualpath.lab.network import FolderError, LabError, check_root, lab_network
from dualpath.lab.removing import NotRemoved, remove_all
from dualpath.lab.spec import LabSpec
from dualpath.serve.supervise import StartFailed

EXIT_FAILED: Final = 1
_RUN_DIR: Final = Path("dualpath-lab")
_CLAIM_S: Final = 60.0

lab_app = typer.Typer(help="Several hosts on this machine, with real NIC limits. Needs root.")
lab_app.command("run")(lab_run_command)


@lab_app.command("up")
def up_command(
    prefill: Annotated[int, typer.Option(help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 1,
    snic_mbit: Annotated[float, typer.Option(help="Storage NIC of a node, Mbit/s.")] = 50.0,
    cnic_mbit: Annotated[float, typer.Option(help="Compute NIC of a node, Mbit/s.")] = 400.0,
    model: Annotated[str, typer.Option(help="'tiny', 'smollm2' or a folder.")] = "tiny",
    mode: Annotated[Mode, typer.Option(help="How KV is loaded.")] = Mode.DUALPATH,
    isolation: Annotated[
        bool, typer.Option(help="KV and model traffic in classes of their own.")
    ] = True,
    engines: Annotated[
        bool, typer.Option(help="Start front and engines; else only the hosts.")
    ] = True,
    run_dir: Annotated[Path, typer.Option(help="Logs and run-time files.")] = _RUN_DIR,
) -> None:
    """Make the hosts and start the front and an engine on each. Ctrl-C, or 'dualpath lab down',
    stops and removes all of it."""
    console = Console(stderr=True)
    spec = LabSpec(
        model=model, prefill=prefill, decode=decode, snic_mbit=snic_mbit, cnic_mbit=cnic_mbit,
        mode=mode, isolation=isolation,
    )  # fmt: skip
    check_root()
    try:
        if engines and (bundled := models.bundled(model)) is not None:
            spec = dataclasses.replace(spec, model=str(models.ensure(bundled)))
        if engines:
            check_model(spec.model, field="--model")
        uvloop.run(_up(spec, run_dir, engines, console))
    except FolderError as error:
        bad_input(f"--run-dir: {error}")
    except (LabError, NotRemoved, StartFailed, models.ModelError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


@lab_app.command("down")
def down_command() -> None:
    """End the lab of this machine and remove whatever is left of an earlier one."""
    check_root()
    console = Console(stderr=True)
    try:
        with console.status("ending the lab"):
            ended = claim.end()
            with claim.claim(_CLAIM_S):
                removed = remove_all()
    except (NotRemoved, claim.LabStays) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if ended:
        typer.echo("the lab is down")
    typer.echo(f"removed: {', '.join(removed)}" if removed else "nothing is left of a lab")


async def _up(spec: LabSpec, run_dir: Path, engines: bool, console: Console) -> None:
    # A signal may come during the start, too.
    await until_stopped(_run(spec, run_dir, engines, console), say_stopping(console))


async def _run(spec: LabSpec, run_dir: Path, engines: bool, console: Console) -> None:
    """Run until cancelled."""

    def say(what: str) -> None:
        console.print(f"making {what} ...", highlight=False)

    if not engines:
        with lab_network(spec, run_dir, say) as network:
            typer.echo(f"ready: hosts {', '.join(network.hosts)} (logs in {run_dir}; Ctrl-C "
                       "removes all)")  # fmt: skip
            await asyncio.Event().wait()
    with engine_progress("starting front and engines", console) as (listen, settled):
        async with lab_cluster(spec, run_dir, listen, say) as lab:
            settled()
            typer.echo(
                f"ready: {lab.front_url}/v1 (model {lab.config.model.name}, mode "
                f"{lab.mode.value}; logs, and the admin key in cluster.toml, in {run_dir}; Ctrl-C "
                "stops and removes all)"
            )
            await asyncio.Event().wait()
