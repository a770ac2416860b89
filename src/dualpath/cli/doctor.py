"""``dualpath doctor``: checks this node and says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from dualpath import config as cluster
from dualpath.doctor import Finding, Level, diagnose

_STYLES: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor_command(
    config: Annotated[Path | None, typer.Option(help="Cluster file to check against.")] = None,
    sysfs: Annotated[
        Path, typer.Option(help="Where the kernel shows its devices.", hidden=True)
    ] = Path("/sys"),
    json: Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout.")] = False,
) -> None:
    """Check this node: libraries, GPU-NIC pairs, network, storage, memory, limits, ports, clock.
    Each line is ok, warn or fail, with what to do. Exit 1 when one fails."""
    described = cluster.load(config) if config is not None else None
    console = Console(stderr=json)
    findings = []
    for finding in diagnose(described, sysfs):
        findings.append(finding)
        _show(console, finding)
    levels = [finding.level for finding in findings]
    healthy = Level.FAIL not in levels
    if json:
        line = {
            "ok": healthy,
            **{level.value: levels.count(level) for level in (Level.WARN, Level.FAIL)},
            "checks": findings,
        }
        typer.echo(msgspec.json.encode(line).decode())
    if not healthy:
        raise typer.Exit(1)


def _show(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.level.value:4}  ", style=_STYLES[finding.level])
    line.append(f"{finding.check}: {finding.text}", style="default")
    console.print(line, soft_wrap=True)
    if finding.todo:
        console.print(Text(f"      -> {finding.todo}"), soft_wrap=True)
