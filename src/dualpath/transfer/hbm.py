"""Where an engine's KV cache lies, and how bytes get in and out of it.

``DeviceCache`` describes the cache as vLLM allocated it: one memory run per (layer, engine
block). ``CopyEngine`` moves bytes between those runs and host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dualpath.blocks import BlockLayout


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Addresses of an engine's KV cache.

    Attributes:
        layer_addresses: address of block 0 of each layer.
        block_stride_bytes: distance between blocks of one layer.
        num_blocks: engine blocks per layer.
        layout: block geometry.
    """

    layer_addresses: tuple[int, ...]
    block_stride_bytes: int
    num_blocks: int
    layout: BlockLayout

    def __post_init__(self) -> None:
        if len(self.layer_addresses) != self.layout.num_layers:
            raise ValueError(
                f"the cache has {len(self.layer_addresses)} layers, the layout "
                f"{self.layout.num_layers}"
            )
        if self.block_stride_bytes < self.layout.engine_layer_block_bytes:
            raise ValueError("blocks of a layer overlap")

    def address(self, layer: int, engine_block: int) -> int:
        """Address of one engine block in one layer.

        Raises:
            IndexError: no such block (a negative id would silently address another layer).
        """
        if not 0 <= engine_block < self.num_blocks:
            raise IndexError(f"engine block {engine_block} is outside 0..{self.num_blocks - 1}")
        return self.layer_addresses[layer] + engine_block * self.block_stride_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """``nbytes`` from ``source`` to ``target`` (addresses)."""

    source: int
    target: int
    nbytes: int


def merge_runs(runs: Sequence[Run]) -> list[Run]:
    """Join neighbours that are contiguous on both sides; order is kept."""
    merged: list[Run] = []
    for run in runs:
        if merged:
            last = merged[-1]
            if last.source + last.nbytes == run.source and last.target + last.nbytes == run.target:
                merged[-1] = Run(last.source, last.target, last.nbytes + run.nbytes)
                continue
        merged.append(run)
    return merged


class CopyEngine(Protocol):
    """Copies between the device cache and host memory.

    ``copy`` is called from the copy thread only, returns when every byte has arrived, and has no
    partial failure: it either copies all runs or raises.
    """

    name: str

    def copy(self, runs: Sequence[Run]) -> int:
        """Copy all runs; returns the bytes moved."""
        ...


class HostCopyEngine:
    """The cache is host memory (vLLM on CPU): plain memmove, which releases the interpreter."""

    name = "host"

    def copy(self, runs: Sequence[Run]) -> int:
        """See ``CopyEngine.copy``."""
        total = 0
        for run in merge_runs(runs):
            ctypes.memmove(run.target, run.source, run.nbytes)
            total += run.nbytes
        return total


def layer_runs(
    cache: DeviceCache, layer: int, engine_blocks: Sequence[int], host_address: int
) -> list[tuple[int, int, int]]:
    """One stored block in one layer as ``(device_address, host_address, nbytes)`` runs.

    Args:
        engine_blocks: the ``engine_blocks_per_block`` vLLM blocks that make up the stored block
            (fewer for the last, partial one).
        host_address: where its Layer Block starts in host memory.
    """
    step = cache.layout.engine_layer_block_bytes
    return [
        (cache.address(layer, block), host_address + index * step, step)
        for index, block in enumerate(engine_blocks)
    ]
