"""``dualpath up``: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop
from rich.console import Console

from dualpath import config as cluster
from dualpath import logs
from dualpath.cli.defaults import default_cluster
from dualpath.cli.signals import say_stopping, until_stopped
from dualpath.cli.starting import engine_progress
from dualpath.config import ClusterConfig, ConfigError, LogConfig, Mode, ModelConfig
from dualpath.engine import models
from dualpath.engine.model_files import check_model
from dualpath.engine.program import engine_argv
from dualpath.serve.local import ClusterFailed, local_cluster
from dualpath.serve.ports import NoFreePort
from dualpath.serve.supervise import StartFailed
from dualpath.storage import StoreError

EXIT_FAILED: Final = 1
_RUN_DIR: Final = Path("dualpath-run")
_STORE: Final = Path("dualpath-store")
_MOST_NODES: Final = 64
"""Of a role, on one machine: each is a process with buffers of a GB."""


def up_command(
    config: Annotated[Path | None, typer.Option(help="Cluster file [a small default].")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Folder, Hugging Face name, 'smollm2' or 'tiny' [smollm2, or the file's]."
        ),
    ] = "",
    mode: Annotated[
        Mode | None, typer.Option(help="How KV is loaded [dualpath, or the file's].")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(min=1, max=_MOST_NODES, help="Prefill nodes [1].")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, max=_MOST_NODES, help="Decode nodes [1].")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Folder or s3:// URL of the KV store [dualpath-store, or the file's]."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Of the API; 0: any free [8000, or the file's]."),
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="Logs and run-time files.")] = _RUN_DIR,
) -> None:
    """Start the front, prefill and decode engines on this machine. Ctrl-C stops all of it."""
    if config is not None and (prefill is not None or decode is not None):
        raise ConfigError(f"--prefill, --decode: {config} describes the nodes; change it there")
    console = Console(stderr=True)
    try:
        described = _described(config, model, mode, prefill or 1, decode or 1, console)
        if store is not None:
            try:
                storage = msgspec.structs.replace(described.storage, path=store)
            except ValueError as error:
                raise ConfigError(f"--store: {error}") from None
            described = msgspec.structs.replace(described, storage=storage)
        if port is not None:
            front = msgspec.structs.replace(described.front, port=port)
            described = msgspec.structs.replace(described, front=front)
        served = described.model
        check_model(
            served.path, field="--model" if model else "model.path", revision=served.revision,
            extra_args=described.engine.extra_args, env=os.environ | described.engine.env,
        )  # fmt: skip
        warnings = _log_to(run_dir, described.log)
        uvloop.run(_up(described, run_dir, console, warnings))
    except (StartFailed, ClusterFailed, NoFreePort, StoreError, models.ModelError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _described(
    config: Path | None, model: str, mode: Mode | None, prefill: int, decode: int, console: Console
) -> ClusterConfig:
    path = _model_path(model, console) if model or config is None else ""
    if config is None:
        return default_cluster(
            path, mode=mode or Mode.DUALPATH, prefill=prefill, decode=decode,
            store=_STORE, port=8000,
        )  # fmt: skip
    described = cluster.load(config)
    # Through the parser again: the mode and the rest must still fit together.
    data = msgspec.toml.decode(cluster.dump(described))
    if mode is not None:
        data["mode"] = mode.value
    if path:
        data["model"] = msgspec.to_builtins(
            ModelConfig(
                path=path, dtype=described.model.dtype, max_model_len=described.model.max_model_len
            )
        )
    return cluster.parse(data, str(config))


def _model_path(model: str, console: Console) -> str:
    bundled = models.bundled(model or "smollm2")
    if bundled is None:
        return model
    if not models.model_path(bundled).is_dir():
        console.print(f"preparing {bundled.value} (once, about a minute) ...", highlight=False)
    return str(models.ensure(bundled))


def _log_to(run_dir: Path, config: LogConfig) -> logging.Handler:
    """The front's log to a file; warnings on stderr as well, by the handler returned."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(run_dir / "front.log", mode="w")
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be used: {error.strerror}") from None
    stderr = logging.StreamHandler()
    stderr.setLevel(logging.WARNING)
    logs.set_up(config, file, stderr)
    return stderr


async def _up(
    config: ClusterConfig, run_dir: Path, console: Console, warnings: logging.Handler
) -> None:
    def stopping() -> None:
        say_stopping(console)()
        warnings.setLevel(logging.ERROR)  # that engines leave is no news now

    # A signal may come during the start, too.
    await until_stopped(_run(config, run_dir, console), stopping)


async def _run(config: ClusterConfig, run_dir: Path, console: Console) -> None:
    """Run until cancelled.

    Raises:
        StartFailed, ClusterFailed: it does not run.
    """
    with engine_progress("starting engines", console) as (listen, settled):
        async with local_cluster(config, run_dir, engine_argv, listen) as running:
            settled()
            served = running.config
            typer.echo(
                f"ready: {running.url}/v1 (model {served.model.name}, mode {served.mode.value}; "
                f"logs in {run_dir}; Ctrl-C stops all)"
            )
            # Not awaited directly: our cancellation must not cancel the front, which drains.
            await asyncio.wait([running.front])
            raise ClusterFailed("the front ended without being told to")
