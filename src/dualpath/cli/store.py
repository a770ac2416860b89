"""``dualpath store``: what is stored, whether it is whole, and making room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpath import config as cluster
from dualpath.cli.common import working
from dualpath.config import ConfigError, StorageConfig, parse_seconds, parse_size
from dualpath.storage import StoreError, Upkeep, open_upkeep
from dualpath.storage.paths import BLOCKS_DIR
from dualpath.storage.types import BlockId
from dualpath.storage.upkeep import RootStats

T = TypeVar("T")

store_app = typer.Typer(
    no_args_is_help=True,
    help="Look after a KV store, in use or at rest.",
    rich_markup_mode=None,  # it would swallow the defaults, which stand in square brackets
)

StorePath = Annotated[
    str | None,
    typer.Argument(help="The store: a directory or s3://bucket/prefix.", show_default=False),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Cluster file that names it.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")]


@store_app.command("stats")
def stats_command(
    path: StorePath = None, config: ConfigFile = None, json: JsonFlag = False
) -> None:
    """Blocks and bytes by namespace (model, weights, tenant), by listing directories."""
    with _opened(path, config) as store, working("listing the store"):
        found, account = store.stats(), store.books()
    total = sum(root.stored_bytes for root in found.values())
    if json:
        _print_json(
            path=store.where,
            blocks=sum(root.blocks for root in found.values()),
            stored_bytes=total,
            unreachable_blocks=sum(root.unreachable_blocks for root in found.values()),
            account=account,
            roots={root.hex(): figures for root, figures in found.items()},
        )
        return
    _print_stats(store.where, found)
    typer.echo(f"{sum(r.blocks for r in found.values()):,} blocks, {total:,} bytes")
    if account is not None:
        typer.echo(
            f"capacity account: {account.published_bytes:,} bytes published, "
            f"{account.reserved_bytes:,} reserved by writers"
        )


@store_app.command("fsck")
def fsck_command(
    path: StorePath = None,
    config: ConfigFile = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    json: JsonFlag = False,
) -> None:
    """Read every block and verify its name, length and checksums. Exit 1 when damaged blocks
    remain."""
    with _opened(path, config) as store, working("reading all blocks"):
        report = store.fsck(repair=repair)
    if json:
        _print_json(
            path=store.where,
            checked=report.checked,
            corrupt=[
                {"root": root.hex(), "key": block.key.hex(), "reason": reason}
                for root, block, reason in report.corrupt
            ],
            removed=report.removed,
        )
    else:
        for root, block, reason in report.corrupt:
            typer.echo(f"{root.hex()[:12]} {block.key.hex()}: {reason}")
        typer.echo(
            f"{report.checked:,} blocks read, {len(report.corrupt):,} damaged, "
            f"{report.removed:,} removed"
        )
    if len(report.corrupt) > report.removed:
        raise typer.Exit(1)


@store_app.command("gc")
def gc_command(
    path: StorePath = None,
    config: ConfigFile = None,
    target: Annotated[
        str, typer.Option(help="Bytes that may stay, such as 80GB [storage.capacity].")
    ] = "",
    min_age: Annotated[
        str, typer.Option(help="Keep what was used within this time, such as 10min.")
    ] = "0s",
    json: JsonFlag = False,
) -> None:
    """Remove the least recently used blocks, never one before those that stand on it and none that
    a running engine needs. Exit 1 when that leaves more than the target."""
    size, keep_s = _target(target, config), _option("--min-age", parse_seconds, min_age)
    start_s = time.monotonic()
    with _opened(path, config) as store, working("removing blocks"):
        report = store.gc(size, min_age_s=keep_s)
    reached = report.kept_bytes <= size
    if json:
        _print_json(
            path=store.where,
            target_bytes=size,
            removed=_by_root(report.removed),
            removed_blocks=len(report.removed),
            freed_bytes=report.freed_bytes,
            kept_bytes=report.kept_bytes,
            reached=reached,
        )
    else:
        typer.echo(
            f"{len(report.removed):,} blocks removed, {report.freed_bytes:,} bytes freed, "
            f"{report.kept_bytes:,} kept, in {time.monotonic() - start_s:.1f} s"
        )
        if not reached:
            typer.echo("the rest is in use or was used too recently", err=True)
    if not reached:
        raise typer.Exit(1)


@contextmanager
def _opened(path: str | None, config: Path | None) -> Iterator[Upkeep]:
    """The store that is meant. What goes wrong inside is one line, and exit 1."""
    storage = _storage(path, config)
    if not storage.in_bucket and not (Path(storage.path) / BLOCKS_DIR).is_dir():
        raise ConfigError(f"{storage.path}: is no store: it has no folder '{BLOCKS_DIR}'")
    try:
        with closing(open_upkeep(storage)) as store:
            yield store
    except StoreError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        where = error.filename or storage.path
        typer.echo(f"error: {where}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None


def _storage(path: str | None, config: Path | None) -> StorageConfig:
    if (path is None) == (config is None):
        raise ConfigError("give either the store or --config")
    if path is None:
        return cluster.load(_given(config)).storage
    try:
        return StorageConfig(path=path)
    except ValueError as error:
        raise ConfigError(f"STORE: {error}") from None


def _given(config: Path | None) -> Path:
    assert config is not None
    return config


def _target(text: str, config: Path | None) -> int:
    if text:
        return int(_option("--target", parse_size, text))
    capacity = cluster.load(config).storage.capacity if config is not None else 0
    if not capacity:
        raise ConfigError("--target: say how many bytes may stay, such as 80GB or 0B")
    return int(capacity)


def _option(name: str, parser: Callable[[object], T], text: str) -> T:
    try:
        return parser(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _by_root(removed: list[tuple[bytes, BlockId]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for root, _block in removed:
        counts[root.hex()] = counts.get(root.hex(), 0) + 1
    return counts


def _print_json(**line: object) -> None:
    typer.echo(msgspec.json.encode(line).decode())


def _print_stats(where: str, found: dict[bytes, RootStats]) -> None:
    table = Table(title=where)
    for name in ("namespace", "blocks", "bytes", "unreachable", "last used"):
        table.add_column(name, justify="left" if name == "namespace" else "right")
    for root, figures in sorted(found.items(), key=lambda item: -item[1].stored_bytes):
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(figures.newest_use_s))
        table.add_row(
            root.hex()[:16], f"{figures.blocks:,}", f"{figures.stored_bytes:,}",
            f"{figures.unreachable_blocks:,}", used,
        )  # fmt: skip
    Console().print(table)
