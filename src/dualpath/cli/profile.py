"""``dualpath profile``: measure a cluster's thresholds and write them where ``up`` reads them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from dualpath import config as cluster
from dualpath.cli.signals import say_stopping, until_stopped
from dualpath.cli.starting import engine_progress
from dualpath.cli.trace import JsonFlag
from dualpath.config import ClusterConfig, ConfigError, StorageConfig
from dualpath.engine.model_files import check_model
from dualpath.engine.program import engine_argv
from dualpath.model import ModelFacts, UnsupportedModel
from dualpath.scheduler.attention_time import FitRefusedError
from dualpath.scheduler.profile import encode_profile
from dualpath.serve.local import ClusterFailed, local_cluster
from dualpath.serve.ports import NoFreePort
from dualpath.serve.supervise import StartFailed
from dualpath.storage import StoreError, scratch_in_bucket
from dualpath.workload.agents import DEFAULT_VOCAB
from dualpath.workload.options import fault_of_url
from dualpath.workload.profile_options import Measured, ProfileOptions, Report
from dualpath.workload.profile_target import ProfileFailed
from dualpath.workload.profiling import measure
from dualpath.workload.stats import trace_stats
from dualpath.workload.trace import TraceError, read_trace

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
_RUN_DIR: Final = Path("dualpath-run")
_OUT: Final = Path("dualpath-profile.json")
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def profile_command(
    config: Annotated[Path, typer.Option(help="Cluster file.")],
    url: Annotated[
        str,
        typer.Option(
            help="Front of the cluster when it runs already; it must serve nobody else meanwhile. "
            "Without it the cluster is started here, and stopped afterwards."
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="File to write.")] = _OUT,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take the hit ratio from this workload instead of what the front has served, or "
            "a replay of 4 agents with 6 turns each."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Deadline of the measurements, s.")] = 1800,
    run_dir: Annotated[
        Path, typer.Option(help="Logs and run-time files of a cluster started here.")
    ] = _RUN_DIR,
    json: JsonFlag = False,
) -> None:
    """Measure each node's SNIC read rate, a PE's prefill rate and its attention times; write the
    scheduler's alpha and beta and the compute quota's model to a file."""
    described = cluster.load(config)
    if url and (wrong := fault_of_url(url)):
        raise ConfigError(f"--url: {wrong}")
    if not timeout < math.inf:
        raise ConfigError("--timeout: must be finite")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.absolute().parent}")
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file")
    hit_ratio = _hit_ratio(trace)
    if not url:
        check_model(
            described.model.path, field=f"{config}: model.path", revision=described.model.revision,
            extra_args=described.engine.extra_args, env=os.environ | described.engine.env,
        )  # fmt: skip
    console = Console(stderr=True)
    options = ProfileOptions(
        url=url,
        model=described.model.name,
        max_model_len=described.model.max_model_len,
        max_batched_tokens=described.engine.max_batched_tokens,
        vocab=_vocab(described),
        hardware=url or f"{platform.machine()}, {os.cpu_count()} cores",
        api_key=next(iter(described.security.api_keys), ""),
        admin_key=described.security.admin_key,
        hit_ratio=hit_ratio,
        hit_ratio_of="" if trace is None else str(trace),
        timeout_s=timeout,
    )
    try:
        measured = asyncio.run(_until_stopped(described, options, run_dir, console))
    except FitRefusedError as error:
        typer.echo(f"error: {error}; nothing was written", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except (ProfileFailed, StartFailed, ClusterFailed, NoFreePort, StoreError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if measured is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    _write(out, encode_profile(measured.profile))
    if json:
        typer.echo(msgspec.json.encode(_figures(measured, out)).decode())
    else:
        _show(measured, out)


async def _until_stopped(
    config: ClusterConfig, options: ProfileOptions, run_dir: Path, console: Console
) -> Measured | None:
    """Measure; None when a signal ended it."""
    work = _measured(config, options, run_dir, console)
    return await until_stopped(work, say_stopping(console))


async def _measured(
    config: ClusterConfig, options: ProfileOptions, run_dir: Path, console: Console
) -> Measured:
    if options.url:
        with _progress(console) as report:
            return await measure(options, report)
    async with _own_cluster(config, run_dir, console) as url:
        options = dataclasses.replace(options, url=url)
        with _progress(console) as report:
            return await measure(options, report)


@contextlib.asynccontextmanager
async def _own_cluster(
    config: ClusterConfig, run_dir: Path, console: Console
) -> AsyncIterator[str]:
    """The cluster, measured as it is without an earlier profile; its URL."""
    scheduler = msgspec.structs.replace(config.scheduler, profile="", decision_log="")
    with _own_store(config.storage) as storage:
        config = msgspec.structs.replace(config, storage=storage, scheduler=scheduler)
        _log_to(run_dir)
        with engine_progress("starting engines", console) as (listen, settled):
            async with local_cluster(config, run_dir, engine_argv, listen) as running:
                settled()
                yield running.url


@contextlib.contextmanager
def _own_store(storage: StorageConfig) -> Iterator[StorageConfig]:
    """A folder of its own inside the store, on the same file system or in the same bucket; it is
    removed afterwards."""
    if storage.in_bucket:
        with scratch_in_bucket(storage, "profile") as own:
            yield own
        return
    folder = _new_folder(storage.path)
    try:
        yield msgspec.structs.replace(storage, path=str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(store: str) -> Path:
    base = Path(store).expanduser()
    try:
        base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".profile-", dir=base))
    except OSError as error:
        raise ConfigError(f"storage.path: {base} cannot be written: {error.strerror}") from None


def _log_to(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=run_dir / "front.log", filemode="w", level=logging.INFO, format=_FORMAT
        )
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be used: {error.strerror}") from None


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """A bar on stderr; a line for each thing measured where there is no terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("profile", total=None)
        said = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal said
            bar.update(task, description=what, completed=done, total=total)
            if what != said and not console.is_terminal:
                console.print(f"measuring: {what}", highlight=False)
            said = what

        yield report


def _hit_ratio(trace: Path | None) -> float | None:
    if trace is None:
        return None
    try:
        return trace_stats(read_trace(trace)).hit_ratio
    except TraceError as error:
        raise ConfigError(f"--trace: {error}") from None


def _vocab(config: ClusterConfig) -> int:
    """Of the model where its folder is here; else a number below nearly every vocabulary's."""
    if not Path(config.model.path).is_dir():
        return DEFAULT_VOCAB
    try:
        return ModelFacts.from_config_json(Path(config.model.path)).vocab_size
    except UnsupportedModel as error:
        raise ConfigError(f"model.path: {error}") from None


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        typer.echo(f"error: --out: {path} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _line(out: Path) -> str:
    return f"profile = {msgspec.json.encode(str(out.absolute())).decode()}"


def _figures(measured: Measured, out: Path) -> dict[str, Any]:
    profile = measured.profile
    return {
        "profile": str(out.absolute()),
        "alpha_tokens": profile.alpha_tokens,
        "beta_tokens": profile.beta_tokens,
        "snic_read_bytes_s": profile.snic_read_bytes_s,
        "snic_lower_bounds": measured.lower_bounds,
        "miss_tokens_per_s": profile.miss_tokens_per_s,
        "hit_ratio": profile.hit_ratio,
        "hit_ratio_of": measured.hit_ratio_of,
        "fit_mean_relative_error": profile.attention.mean_relative_error,
        "fit_measurements": len(profile.attention.residuals),
        "config": {"scheduler": {"profile": str(out.absolute())}},
    }


def _show(measured: Measured, out: Path) -> None:
    profile, say = measured.profile, typer.echo
    say(f"alpha  {profile.alpha_tokens:,} tokens (what the slowest SNIC reads in 3 s)")
    say(f"beta   {profile.beta_tokens:,} tokens (5 s of a PE, hit tokens included)")
    for node, rate in profile.snic_read_bytes_s.items():
        bound = "  at least: it was never busy for long" if node in measured.lower_bounds else ""
        say(f"SNIC   {node}: {rate / 1e6:,.2f} MB/s{bound}")
    say(f"prefill {profile.miss_tokens_per_s:,.1f} miss tokens/s of one PE")
    say(f"hit ratio {profile.hit_ratio:.1%} (of {measured.hit_ratio_of})")
    fit = profile.attention
    say(
        f"attention fit off by {fit.mean_relative_error:.1%} on average "
        f"over {len(fit.residuals)} kinds of step"
    )
    say(f"\nIn the cluster file:\n\n[scheduler]\n{_line(out)}")
