"""How ``dualpath trace`` prints the figures of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpath.workload.blocks import Sharing
from dualpath.workload.stats import TraceStats
from dualpath.workload.workingset import WorkingSet


def show_stats(
    figures: TraceStats,
    path: Path,
    as_json: bool,
    *,
    sharing: Sharing | None = None,
    working: WorkingSet | None = None,
    kv_bytes_per_token: int | None = None,
    **more: Any,
) -> None:
    """Print a workload's figures; ``more`` are further keys of the JSON object."""
    if as_json:
        line: dict[str, Any] = {"path": str(path), **figures.to_json(), **more}
        if sharing is not None:
            line["sharing"] = {
                "hit_ratio": sharing.hit_ratio,
                "shared_tokens": sharing.shared_tokens,
                "shared_first_tokens": sharing.shared_first_tokens,
            }
        if working is not None:
            line["working_set"] = working.to_json()
            if kv_bytes_per_token is not None:
                line["working_set"]["bytes"] = working.bytes(kv_bytes_per_token)
        typer.echo(msgspec.json.encode(line).decode())
        return
    table = Table(title=f"{path}: {figures.trajectories} trajectories, {figures.requests} requests")
    for name in ("reading", "turns", "append", "gen", "total", "mean context"):
        table.add_column(name, justify="left" if name == "reading" else "right")
    for name, reading in (("per trajectory", figures.macro), ("per request", figures.request)):
        means = (figures.turns, reading.append, reading.gen, figures.total, reading.context)
        table.add_row(name, *(f"{mean:,.1f}" for mean in means))
    console = Console()
    console.print(table)
    latency = figures.tool_latency_s
    console.print(
        f"tokens in {figures.tokens_in:,}, out {figures.tokens_out:,}; longest context "
        f"{figures.max_context:,}; hit ratio of an unbounded cache {figures.hit_ratio:.1%}; "
        f"mean tool latency {'unknown' if latency is None else f'{latency:.1f} s'}"
    )
    if sharing is not None:
        console.print(
            f"with blocks shared between trajectories the hit ratio is {sharing.hit_ratio:.1%}: "
            f"{sharing.shared_tokens:,} tokens more, {sharing.shared_first_tokens:,} of them in "
            "first rounds"
        )
    if working is not None:
        size = ""
        if kv_bytes_per_token is not None:
            size = f" ({working.bytes(kv_bytes_per_token) / 1e9:,.1f} GB)"
        console.print(
            f"at {working.aps:g} agents/s: {working.agents:,.1f} agents alive for "
            f"{working.jct_s:,.1f} s, {working.tool_share:.0%} of it in tools; working set "
            f"{working.tokens:,.0f} tokens{size}; a context is used again after "
            f"{working.reuse_s:,.1f} s"
        )
