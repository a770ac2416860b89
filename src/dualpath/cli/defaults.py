"""The cluster that ``up`` and ``demo`` run when no file describes one; how they start engines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from dualpath.config import (
    BufferConfig,
    ClusterConfig,
    EngineConfig,
    FrontConfig,
    Mode,
    ModelConfig,
    NodeConfig,
    Role,
    Size,
    SnicConfig,
    StorageConfig,
)

_MIB: Final = 1 << 20


def default_cluster(
    model_path: Path | str,
    *,
    mode: Mode,
    prefill: int,
    decode: int,
    store: Path,
    port: int,
    snic: SnicConfig = SnicConfig(),  # noqa: B008 - immutable
) -> ClusterConfig:
    """``prefill`` + ``decode`` nodes of one engine each, sized for a small model on this machine.

    Raises:
        ConfigError: a number makes no sense.
    """
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode))
    nodes = tuple(
        NodeConfig(name=f"{role.value}-{number}", role=role, snic=snic)
        for role, count in counts
        for number in range(count)
    )
    threads = max(1, (os.cpu_count() or 1) // max(1, len(nodes)))
    return ClusterConfig(
        model=ModelConfig(path=str(model_path)),
        nodes=nodes,
        mode=mode,
        front=FrontConfig(port=port, control_port=0),
        storage=StorageConfig(path=str(store)),
        buffers=BufferConfig(
            prefill=Size(512 * _MIB), decode=Size(1024 * _MIB),
            landing=Size(32 * _MIB), persist=Size(128 * _MIB),
        ),
        engine=EngineConfig(kv_cache=Size(768 * _MIB), threads=threads),
    )  # fmt: skip


def engine_argv(config_file: Path, run_dir: Path, role: Role, rank: int) -> list[str]:
    """``dualpath engine`` for one engine, with this interpreter."""
    return [
        *(sys.executable, "-m", "dualpath.cli.main", "engine"),
        *("--config", str(config_file), "--run-dir", str(run_dir)),
        *("--role", role.value, "--rank", str(rank)),
    ]
