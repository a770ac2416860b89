"""Where blocks lie on both sides, worked out once and used for every layer.

A block's Layer Blocks are at the same distances from each other in every layer, on the host as in
the cache. So addresses are built, checked, sorted and joined once; a layer costs two additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from dualpath.transfer.descriptors import U64, Descriptors
from dualpath.transfer.hbm import DeviceCache


class BlockMap:
    """Some stored blocks in the device cache and in host memory (ours or a peer's).

    Args:
        cache: the device cache.
        engine_blocks: for each stored block the vLLM blocks that make it up, in order (fewer for
            a last, partial one).
        host: for each the address of its layer 0 in host memory.

    Raises:
        IndexError: the cache has no such block.
        ValueError: not one address for each block.
    """

    __slots__ = ("_cache", "_host", "_offsets", "_sizes", "nbytes")

    def __init__(
        self, cache: DeviceCache, engine_blocks: Sequence[Sequence[int]], host: Sequence[int]
    ) -> None:
        counts = np.array([len(blocks) for blocks in engine_blocks], dtype=np.int64)
        if len(counts) != len(host):
            raise ValueError(f"{len(counts)} blocks and {len(host)} addresses")
        flat = np.fromiter(chain.from_iterable(engine_blocks), np.int64, int(counts.sum()))
        if len(flat) and not (flat.min() >= 0 and flat.max() < cache.num_blocks):
            bad = flat[(flat < 0) | (flat >= cache.num_blocks)][0]
            raise IndexError(f"engine block {bad} is outside 0..{cache.num_blocks - 1}")
        step = cache.layout.engine_layer_block_bytes
        # Position of each vLLM block inside its stored block.
        inside = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(np.array(host, dtype=np.int64), counts) + inside * step
        joined = Descriptors(
            (flat * cache.block_stride_bytes).astype(np.uint64),
            places.astype(np.uint64),
            np.full(len(flat), step, dtype=np.uint64),
        ).merged()
        self._cache = cache
        self._offsets: U64 = joined.local
        self._host: U64 = joined.remote
        self._sizes: U64 = joined.sizes
        self.nbytes = len(flat) * step
        """Bytes of one layer."""

    def __len__(self) -> int:
        """Ranges of one layer."""
        return len(self._sizes)

    def into_cache(self, layer: int, host_offset_bytes: int) -> Descriptors:
        """One layer from the host into the cache.

        Args:
            host_offset_bytes: of this layer from the host addresses given at the start.
        """
        return Descriptors(self._places(host_offset_bytes), self._device(layer), self._sizes)

    def out_of_cache(self, layer: int, host_offset_bytes: int) -> Descriptors:
        """One layer from the cache to the host."""
        return Descriptors(self._device(layer), self._places(host_offset_bytes), self._sizes)

    def all_out_of_cache(self) -> Descriptors:
        """All layers of Full Blocks on the host, as one submission."""
        layout = self._cache.layout
        layers = [
            self.out_of_cache(layer, layout.layer_offset_bytes(layer))
            for layer in range(layout.num_layers)
        ]
        return Descriptors.joined(layers).merged()

    def _device(self, layer: int) -> U64:
        return self._offsets + np.uint64(self._cache.layer_addresses[layer])

    def _places(self, host_offset_bytes: int) -> U64:
        return self._host + np.uint64(host_offset_bytes)
