"""Addresses of blocks for all layers, against the plain way to work them out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.blocks import BlockLayout
from dualpath.transfer.block_map import BlockMap
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.hbm import DeviceCache, layer_runs

pytestmark = pytest.mark.unit

LAYOUT = BlockLayout(num_layers=3, block_tokens=64, engine_block_tokens=16, token_layer_bytes=2)
STEP = LAYOUT.engine_layer_block_bytes
BLOCKS = 40
SEPARATE = DeviceCache((10_000, 20_000, 40_000), STEP, BLOCKS, LAYOUT)
TOGETHER = DeviceCache(tuple(10_000 + layer * STEP for layer in range(3)), 3 * STEP, BLOCKS, LAYOUT)


def moved(ranges: Descriptors) -> set[tuple[int, int]]:
    return {
        (local + byte, remote + byte)
        for local, remote, size in zip(
            ranges.local.tolist(), ranges.remote.tolist(), ranges.sizes.tolist(), strict=True
        )
        for byte in range(size)
    }


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Blocks of a prompt, the last one perhaps partial, in slots in any order."""
    ids = draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=24))
    per = LAYOUT.engine_blocks_per_block
    blocks = [ids[start : start + per] for start in range(0, len(ids), per)]
    slots = draw(st.permutations(range(8)))[: len(blocks)]
    return blocks, [1_000_000 + slot * LAYOUT.slot_bytes for slot in slots]


@given(chain=chains(), cache=st.sampled_from([SEPARATE, TOGETHER]))
def test_every_byte_of_every_layer(
    chain: tuple[list[list[int]], list[int]], cache: DeviceCache
) -> None:
    blocks, host = chain
    places = BlockMap(cache, blocks, host)
    everything = set()
    for layer in range(LAYOUT.num_layers):
        offset = LAYOUT.layer_offset_bytes(layer)
        expected = {
            (device + byte, address + byte)
            for ids, base in zip(blocks, host, strict=True)
            for device, address, size in layer_runs(cache, layer, ids, base + offset)
            for byte in range(size)
        }
        assert moved(places.out_of_cache(layer, offset)) == expected
        assert {(b, a) for a, b in moved(places.into_cache(layer, offset))} == expected
        assert places.nbytes == len(expected)
        everything |= expected
    out = places.all_out_of_cache()
    assert moved(out) == everything
    assert out.nbytes == len(everything)


def test_a_cache_with_blocks_outermost_is_one_run_a_block() -> None:
    """As GPU backends can keep it: a vLLM block of 64 tokens is then a Full Block."""
    layout = BlockLayout(num_layers=3, block_tokens=64, engine_block_tokens=64, token_layer_bytes=2)
    size = layout.layer_block_bytes
    cache = DeviceCache(tuple(4096 + layer * size for layer in range(3)), 3 * size, BLOCKS, layout)
    places = BlockMap(cache, [[5], [9]], [1 << 20, 1 << 21])
    assert places.all_out_of_cache().sizes.tolist() == [3 * size, 3 * size]


def test_neighbours_are_joined_once_for_all_layers() -> None:
    places = BlockMap(SEPARATE, [[4, 5, 6, 7], [8, 9, 30, 31]], [4096, 4096 + 4 * STEP])
    assert len(places) == 2
    assert places.into_cache(1, 0).sizes.tolist() == [6 * STEP, 2 * STEP]
    assert places.into_cache(1, 0).remote.tolist() == [20_000 + 4 * STEP, 20_000 + 30 * STEP]


def test_what_is_not_there_is_refused() -> None:
    for bad in (-1, BLOCKS):
        with pytest.raises(IndexError, match=f"engine block {bad} is outside 0..39"):
            BlockMap(SEPARATE, [[0, bad]], [4096])
    with pytest.raises(ValueError, match="1 blocks and 2 addresses"):
        BlockMap(SEPARATE, [[0]], [4096, 8192])
    empty = BlockMap(SEPARATE, [], [])
    assert len(empty) == 0
    assert empty.nbytes == 0
    assert np.array_equal(empty.all_out_of_cache().sizes, [])
