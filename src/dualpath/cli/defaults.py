"""The cluster that ``up`` and ``demo`` run when no file describes one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dualpath.config import ClusterConfig, Mode, Role, parse


def default_cluster(
    model_path: Path | str,
    *,
    mode: Mode,
    prefill: int,
    decode: int,
    store: Path,
    port: int,
    **tables: Any,
) -> ClusterConfig:
    """``prefill`` + ``decode`` nodes of one engine each, sized for a small model on this machine.

    Args:
        tables: further tables as they would stand in a file; ``snic`` is every node's.

    Raises:
        ConfigError: something makes no sense.
    """
    snic = tables.pop("snic", {})
    nodes = [
        {"name": f"{role.value}-{number}", "role": role.value, "snic": snic}
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for number in range(count)
    ]
    threads = max(1, (os.cpu_count() or 1) // max(1, len(nodes)))
    data = {
        "model": {"path": str(model_path)},
        "mode": mode.value,
        "nodes": nodes,
        "front": {"port": port, "control_port": 0},
        "storage": {"path": str(store)},
        "buffers": {
            "prefill": "512MiB",
            "decode": "1GiB",
            "landing": "32MiB",
            "persist": "128MiB",
        },
        "engine": {"kv_cache": "768MiB", "threads": threads},
    }
    return parse(data | tables, "default cluster")
