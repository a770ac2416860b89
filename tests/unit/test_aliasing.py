"""Where layers that take turns lie, and which models they are refused for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from dualpath.blocks import BlockLayout
from dualpath.config import ClusterConfig, Role, parse
from dualpath.engine.aliasing import (
    aliased,
    planned_bytes,
    refuse_layers,
    regions_of,
)
from dualpath.engine.identity import UnsupportedEngine
from dualpath.engine.one_step import is_stranded
from dualpath.transfer.hbm import DeviceCache

pytestmark = pytest.mark.unit

LAYERS, BLOCKS = 5, 7
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
PAGE = SPEC.page_size_bytes
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


def described(**changes: object) -> ClusterConfig:
    return parse(
        {
            "model": {"path": "m"},
            "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
            **changes,
        }
    )


def plan(*, block_outermost: bool = False, blocks: int = BLOCKS) -> KVCacheConfig:
    """What vLLM plans: all layers in one allocation. Names not in the order of the model."""
    names = list(reversed(NAMES))
    layer_stride, block_stride = (PAGE, LAYERS * PAGE) if block_outermost else (PAGE * blocks, PAGE)
    tensor = KVCacheTensor(LAYERS * PAGE * blocks, names, layer_stride, block_stride)
    return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, SPEC)])


def test_who_keeps_how_many_layers() -> None:
    on = {"engine": {"layer_aliasing": True, "prefetch_layers": 2}}
    assert described(**on).layer_regions(Role.PREFILL, 30) == 3
    assert described(**on).layer_regions(Role.PREFILL, 2) == 2, "no more than there are"
    assert described(**on).layer_regions(Role.DECODE, 30) == 30
    assert described(**on, mode="basic").layer_regions(Role.PREFILL, 30) == 30
    assert described(**on, mode="split").layer_regions(Role.PREFILL, 30) == 3
    assert described(engine={"layer_aliasing": False}).layer_regions(Role.PREFILL, 30) == 30
    assert described(engine={"layer_aliasing": True}).layer_regions(Role.PREFILL, 30) == 2


@pytest.mark.parametrize("regions", [2, 3, 4])
def test_every_layer_lies_in_its_region_and_nothing_is_larger(regions: int) -> None:
    available = 10_000_000
    blocks = planned_bytes(available, LAYERS, regions) // (LAYERS * PAGE)
    assert blocks == available // (regions * PAGE), "n_layer / R times as many, to the block"
    placed, size = aliased(plan(blocks=blocks), regions, available)
    assert size == regions * blocks * PAGE <= available
    assert placed.num_blocks == blocks
    assert [tensor.layers for tensor in placed.kv_cache_tensors] == [[name] for name in NAMES]
    for layer, tensor in enumerate(placed.kv_cache_tensors):
        assert tensor.offset == (layer % regions) * blocks * PAGE
        assert (tensor.size, tensor.block_stride) == (size, PAGE)
        assert tensor.offset + blocks * PAGE <= size


def test_the_real_size_is_checked() -> None:
    with pytest.raises(UnsupportedEngine, match="do not fit"):
        aliased(plan(), 2, 2 * BLOCKS * PAGE - 1)
    aliased(plan(), 2, 2 * BLOCKS * PAGE)


def test_layouts_without_a_run_per_layer_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedEngine, match="VLLM_KV_CACHE_LAYOUT"):
        aliased(plan(block_outermost=True), 2, 1 << 30)


def test_groups_are_refused() -> None:
    two = plan()
    two.kv_cache_groups.append(two.kv_cache_groups[0])
    with pytest.raises(UnsupportedEngine, match="2 KV cache groups"):
        aliased(two, 2, 1 << 30)


def test_models_that_cannot_take_turns_are_refused_by_the_layer() -> None:
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=128
    )
    with pytest.raises(UnsupportedEngine, match=r"layer b: sliding-window"):
        refuse_layers({"a": SPEC, "b": window})
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedEngine, match=r"layer s: a MambaSpec is not attention"):
        refuse_layers({"a": SPEC, "s": state})
    other = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32)
    with pytest.raises(UnsupportedEngine, match="different sizes"):
        refuse_layers({"a": SPEC, "b": other})
    refuse_layers({"a": SPEC, "b": SPEC})


OURS = {"dualpath": {"rid": "r", "attempt": 0}}


@pytest.mark.parametrize(
    ("computed", "most", "params", "stranded"),
    [
        (0, 5, None, False),
        (60, 1, None, True),
        (60, 1, OURS, False),
        (100, 1, None, False),
        (100, 1, OURS, False),
        (100, 2, None, True),
        (100, 2, OURS, True),
    ],
    ids=["not begun", "another's chunk", "our chunk", "another's last step under way",
         "our last step under way", "another decodes", "ours decodes"],
)  # fmt: skip
def test_who_cannot_go_on(computed: int, most: int, params: object, stranded: bool) -> None:
    request = SimpleNamespace(
        request_id="x", num_computed_tokens=computed, num_prompt_tokens=100, max_tokens=most,
        kv_transfer_params=params,
    )  # fmt: skip
    assert is_stranded(request) is stranded  # type: ignore[arg-type]


def test_a_cache_that_lies_elsewhere_is_refused() -> None:
    """vLLM started without our worker: every layer has memory of its own."""
    layout = BlockLayout(num_layers=4, block_tokens=64, engine_block_tokens=64, token_layer_bytes=8)
    on = described(engine={"layer_aliasing": True})
    apart = DeviceCache((1000, 2000, 3000, 4000), 512, 2, layout)
    turns = DeviceCache((1000, 2000, 1000, 2000), 512, 2, layout)
    mixed = DeviceCache((1000, 2000, 2000, 1000), 512, 2, layout)
    regions = regions_of(on, Role.PREFILL, turns)
    assert regions is not None
    assert (regions.layers, regions.count) == (4, 2)
    assert regions_of(on, Role.DECODE, apart) is None
    for cache in (apart, mixed):
        with pytest.raises(UnsupportedEngine, match="--worker-cls"):
            regions_of(on, Role.PREFILL, cache)
    with pytest.raises(UnsupportedEngine, match="2 regions, not 4"):
        regions_of(on, Role.DECODE, turns)
