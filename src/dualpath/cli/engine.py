"""``dualpath engine``: becomes vLLM's API server with our connector."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dualpath import config as cluster
from dualpath.config import ClusterConfig, ConfigError, Role
from dualpath.engine import launch
from dualpath.engine.model_files import check_model


def engine_command(
    config: Annotated[Path, typer.Option(help="Cluster file.")],
    role: Annotated[Role, typer.Option(help="Prefill or decode.")],
    rank: Annotated[int, typer.Option(min=0, help="Number among the engines of its role.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port [the node's base_port + rank there].")
    ] = 0,
    control: Annotated[
        str, typer.Option(help="HOST:PORT of the front's control server [front.control_*].")
    ] = "",
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder that this node's engines share [in /tmp].")
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the vLLM command line; start nothing.")
    ] = False,
) -> None:
    """Run one engine. This process becomes vLLM's own API server; a cluster manager may as well
    start the printed command itself."""
    config = config.absolute()
    described = cluster.load(config)
    try:
        device = launch.installed_device()
    except launch.NoEngine as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if rank >= (count := len(described.engines(role))):
        raise ConfigError(
            f"--rank: {rank} does not exist; {config} has {count} {role.value} engines, "
            "numbered from 0"
        )
    place = launch.EnginePlace(
        config_file=config,
        role=role,
        rank=rank,
        http_port=port or launch.http_port(described, role, rank),
        control=_address(control) if control else launch.control_address(described),
        run_dir=(run_dir or _default_run_dir(described)).absolute(),
    )
    command = launch.engine_command(
        described, place, python=sys.executable, device=device, inherited=os.environ
    )
    if print_command:
        typer.echo(command.shell())
        return
    served = described.model
    check_model(
        served.path, field=f"{config}: model.path", revision=served.revision,
        extra_args=described.engine.extra_args, env={**os.environ, **command.env},
    )  # fmt: skip
    try:
        place.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir: {place.run_dir}: {error.strerror}") from None
    os.execve(command.argv[0], command.argv, {**os.environ, **command.env})


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--control: expected HOST:PORT, got {text!r}")
    return text


def _default_run_dir(config: ClusterConfig) -> Path:
    """The same for all engines of this user and cluster on a node, and of nobody else."""
    path = Path(tempfile.gettempdir()) / f"dualpath-{os.getuid()}" / config.name
    parent = path.parent
    if parent.exists() and parent.stat().st_uid != os.getuid():
        raise ConfigError(f"--run-dir: {parent} belongs to another user; name a folder")
    return path
