"""All checks of a node, in the order in which people look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dualpath.blocks import BlockLayout
from dualpath.config import ClusterConfig
from dualpath.doctor.fabric import check_fabric, check_pairs
from dualpath.doctor.finding import Finding, ok, warn
from dualpath.doctor.kv import check_buffers, check_cache, check_hbm, check_model
from dualpath.doctor.machine import (
    check_clock,
    check_limits,
    check_memory,
    check_ports,
    local_nodes,
    read_memory,
    registered_bytes,
)
from dualpath.doctor.pci import find_gpus, find_nics
from dualpath.doctor.software import check_software
from dualpath.doctor.store import check_storage

_USUAL_LAYOUT: Final = BlockLayout(
    num_layers=32, block_tokens=64, engine_block_tokens=64, token_layer_bytes=1024
)
"""2 MiB a block: what storage is measured with where the model is not known."""


def diagnose(config: ClusterConfig | None, sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """Look at this machine, and at what ``config`` asks of it.

    Yields each finding as it is made; measuring storage takes a few seconds, and so does the
    import of vLLM.

    Args:
        config: None to look at the machine alone.
        sysfs: where the kernel shows its devices.
    """
    yield from check_software()
    nodes = local_nodes(config) if config is not None else []
    yield from check_pairs(sysfs)
    yield from check_fabric(sysfs, nodes, config)
    gpus, nics = find_gpus(sysfs), find_nics(sysfs)
    needs_locked = registered_bytes(config, nodes) if config is not None and nics else 0
    yield from check_limits(needs_locked)
    yield check_clock()
    if config is None:
        yield warn(
            "cluster", "no cluster file: memory, buffers, storage and ports are not checked",
            "dualpath doctor --config FILE",
        )  # fmt: skip
        return
    if nodes:
        yield ok("cluster", f"this machine is {', '.join(node.name for node in nodes)}")
    else:
        yield warn(
            "cluster", "no node's host is an address of this machine",
            "run this on the nodes, or correct nodes.host",
        )  # fmt: skip
    finding, layout = check_model(config)
    yield finding
    if layout is not None:
        yield from check_buffers(config, layout, nodes)
        yield from check_cache(config, layout, nodes)
    yield from check_memory(config, nodes, read_memory(), on_cpu=not gpus)
    if gpus:
        yield from check_hbm(config)
    yield from check_storage(config, layout or _USUAL_LAYOUT, nodes)
    yield from check_ports(config, nodes)
