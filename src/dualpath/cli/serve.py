"""``dualpath serve``: the front alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import uvloop
from msgspec import structs

from dualpath import config as cluster
from dualpath import logs
from dualpath.cli.signals import stop_on_signal
from dualpath.config import ClusterConfig, ConfigError, LogFormat
from dualpath.serve import serve
from dualpath.storage import StoreError


def serve_command(
    config: Annotated[Path, typer.Option(help="Cluster file.")],
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Of log lines [text, or the file's].")
    ] = None,
) -> None:
    """Run the front and the scheduler; the engines run elsewhere (see 'dualpath engine')."""
    described = cluster.load(config)
    for field, port in (
        ("port", described.front.port),
        ("control_port", described.front.control_port),
    ):
        if port == 0:
            raise ConfigError(f"{config}: front.{field}: must be set for 'serve'; engines and "
                              "clients could not find a free one")  # fmt: skip
    if log_format is not None:
        described = structs.replace(
            described, log=structs.replace(described.log, format=log_format)
        )
    logs.set_up(described.log)
    try:
        uvloop.run(_serve(described))
    except StoreError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(
            f"error: the front cannot listen: {error}; change [front] in {config}, or stop what "
            "uses the port",
            err=True,
        )
        raise typer.Exit(1) from None


async def _serve(config: ClusterConfig) -> None:
    with stop_on_signal() as stop:
        await serve(config, ready=lambda url: typer.echo(f"ready: {url}/v1"), stop=stop)
