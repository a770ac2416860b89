"""Where an engine's KV cache lies, and how bytes get in and out of it.

``DeviceCache`` describes the cache as vLLM allocated it: one memory run per (layer, engine
block). A ``CopyEngine`` moves bytes between those runs and host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.blocks import BlockLayout
from dualpath.transfer.copy_host import HostCopyEngine
from dualpath.transfer.copying import CopyEngine, Run, merge_runs


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Addresses of an engine's KV cache.

    Attributes:
        layer_addresses: address of block 0 of each layer.
        block_stride_bytes: distance between blocks of one layer.
        num_blocks: engine blocks per layer.
        layout: block geometry.
        device: number of the GPU whose memory this is; None for host memory.
    """

    layer_addresses: tuple[int, ...]
    block_stride_bytes: int
    num_blocks: int
    layout: BlockLayout
    device: int | None = None

    def __post_init__(self) -> None:
        if len(self.layer_addresses) != self.layout.num_layers:
            raise ValueError(
                f"the cache has {len(self.layer_addresses)} layers, the layout "
                f"{self.layout.num_layers}"
            )
        if self.block_stride_bytes < self.layout.engine_layer_block_bytes:
            raise ValueError("blocks of a layer overlap")

    @property
    def regions(self) -> int:
        """Layers that have memory of their own; fewer than there are where they take turns."""
        return len(set(self.layer_addresses))

    def address(self, layer: int, engine_block: int) -> int:
        """Address of one engine block in one layer.

        Raises:
            IndexError: no such block (a negative id would silently address another layer).
        """
        if not 0 <= engine_block < self.num_blocks:
            raise IndexError(f"engine block {engine_block} is outside 0..{self.num_blocks - 1}")
        return self.layer_addresses[layer] + engine_block * self.block_stride_bytes


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


__all__ = ["CopyEngine", "DeviceCache", "HostCopyEngine", "Run", "layer_runs", "merge_runs"]
