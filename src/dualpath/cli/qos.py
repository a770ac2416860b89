"""``dualpath qos``: traffic classes of the compute network, and whether they are in force."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from dualpath import config as cluster
from dualpath.config import ClusterConfig, ConfigError, NodeConfig, parse_seconds
from dualpath.doctor.machine import local_nodes
from dualpath.fabric import Fabric
from dualpath.transfer.qos.check import Report, check
from dualpath.transfer.qos.classes import TrafficClass, marks
from dualpath.transfer.qos.render import render
from dualpath.transfer.qos.system import ThisMachine, ToolFailed, ToolMissing
from dualpath.transfer.qos.text import File, Rendered
from dualpath.transfer.qos.verdict import Verdict

_EXIT: Final = {Verdict.IN_FORCE: 0, Verdict.NOT_IN_FORCE: 1, Verdict.UNKNOWN: 3}
_STYLES: Final = {
    Verdict.IN_FORCE: "green", Verdict.NOT_IN_FORCE: "bold red", Verdict.UNKNOWN: "yellow",
}  # fmt: skip
_SCRIPT_MODE: Final = 0o755
_FILE_MODE: Final = 0o644

qos_app = typer.Typer(
    no_args_is_help=True,
    help="Keep model and KV traffic apart on the compute network.",
    rich_markup_mode=None,  # it would swallow the defaults, which stand in square brackets
)

ConfigFile = Annotated[Path, typer.Option("--config", help="Cluster file.")]
FabricOption = Annotated[
    Fabric | None, typer.Option("--fabric", help="What the network is made of [fabric.kind].")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")]


@qos_app.command("render")
def render_command(
    config: ConfigFile,
    fabric: FabricOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the files to [they are printed].")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Write what arbiters and libraries have to be told: opensm.conf on InfiniBand, an mlnx_qos
    script on RoCE, tc scripts over TCP, and the environment of NCCL, NVSHMEM and UCX. Nothing is
    applied."""
    described = cluster.load(config)
    kind = fabric or described.fabric.kind
    with _in_file(config):
        rendered = render(described, kind)
    for warning in rendered.warnings:
        typer.echo(f"warning: {config}: {warning}", err=True)
    if out is not None:
        _write(out, rendered)
    elif not json:
        _print(rendered.files)
    if json:
        typer.echo(msgspec.json.encode(_rendered_line(described, kind, rendered, out)).decode())


@qos_app.command("check")
def check_command(
    config: ConfigFile,
    fabric: FabricOption = None,
    node: Annotated[
        list[str] | None, typer.Option(help="Node of the file that this machine is [by address].")
    ] = None,
    interval: Annotated[
        str, typer.Option(help="How long to watch the counters of each node; 0s for not at all.")
    ] = "1s",
    json: JsonFlag = False,
    sysfs: Annotated[
        Path, typer.Option(help="Where the kernel shows its devices.", hidden=True)
    ] = Path("/sys"),
) -> None:
    """Look whether the classes are in force on this machine. Nothing is changed. Exit 0 when they
    are, 1 when not, 3 when it cannot be told."""
    described = cluster.load(config)
    kind = fabric or described.fabric.kind
    try:
        interval_s = parse_seconds(interval)
    except ValueError as error:
        raise ConfigError(f"--interval: {error}") from None
    try:
        with _in_file(config):
            nodes = _nodes(described, node)
            report = check(described, nodes, kind, ThisMachine(sysfs), interval_s)
    except (ToolMissing, ToolFailed) as error:
        typer.echo(f"error: counters could not be read again: {error}", err=True)
        raise typer.Exit(_EXIT[Verdict.UNKNOWN]) from None
    _show(report, Console(stderr=json))
    if json:
        line = {
            "fabric": kind.value,
            "verdict": report.verdict.value,
            "in_force": report.verdict is Verdict.IN_FORCE,
            "checks": report.checks,
            "counted": report.counted,
        }
        typer.echo(msgspec.json.encode(line).decode())
    raise typer.Exit(_EXIT[report.verdict])


@contextlib.contextmanager
def _in_file(path: Path) -> Iterator[None]:
    """Name the cluster file in what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _nodes(config: ClusterConfig, names: Sequence[str] | None) -> list[NodeConfig]:
    nodes = [config.node(name) for name in names] if names else local_nodes(config)
    if not nodes:
        raise ConfigError(
            "no node's host is an address of this machine; say which node it is with --node"
        )
    return nodes


def _write(out: Path, rendered: Rendered) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in rendered.files:
            path = out / file.name
            path.write_text(file.text)
            path.chmod(_SCRIPT_MODE if file.executable else _FILE_MODE)
            typer.echo(str(path), err=True)
    except OSError as error:
        raise ConfigError(f"--out: {error.filename or out}: {error.strerror}") from None


def _print(files: Sequence[File]) -> None:
    for file in files:
        typer.echo(f"# ---- {file.name}")
        typer.echo(file.text)


def _rendered_line(
    config: ClusterConfig, fabric: Fabric, rendered: Rendered, out: Path | None
) -> dict[str, object]:
    files: object = {file.name: file.text for file in rendered.files}
    if out is not None:
        files = [str(out / file.name) for file in rendered.files]
    return {
        "fabric": fabric.value,
        "files": files,
        "warnings": rendered.warnings,
        "classes": {
            node.name: {
                traffic.value: marks(config, node, traffic, fabric) for traffic in TrafficClass
            }
            for node in config.nodes
        },
    }


def _show(report: Report, console: Console) -> None:
    for found in report.checks:
        line = Text(f"{found.verdict.value:13} ", style=_STYLES[found.verdict])
        line.append(f"{found.where}: {found.what}: {found.text}", style="default")
        console.print(line, soft_wrap=True)
        if found.todo:
            console.print(Text(f"              -> {found.todo}"), soft_wrap=True)
    for counted in report.counted:
        text = (
            f"{counted.where}: in {counted.seconds:.1f} s {counted.model_bytes:,} bytes of model "
            f"traffic and {counted.kv_bytes:,} bytes of KV went out"
        )
        console.print(Text(f"counted       {text}"), soft_wrap=True)
    if not report.counted:
        console.print(Text("counted       nothing: no counters by class were read"), soft_wrap=True)
