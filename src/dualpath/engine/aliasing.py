"""Layerwise memory in vLLM: all layers of a PE share R regions of its KV cache.

vLLM plans the cache as if it had ``n_layer / R`` times the memory, so it hands out as many times
more blocks; then each layer's tensor is placed in region ``layer % R`` of one small allocation.
What makes that correct is in ``transfer.regions`` and ``worker_side``; docs/layerwise.md has all.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dualpath.config import ClusterConfig, Role
from dualpath.engine.assemble import layer_numbers
from dualpath.engine.identity import UnsupportedEngine
from dualpath.transfer.hbm import DeviceCache
from dualpath.transfer.regions import Regions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def planned_bytes(available_bytes: int, layers: int, regions: int) -> int:
    """The memory vLLM must believe in to plan blocks that fill ``available_bytes`` when only
    ``regions`` of ``layers`` layers are there."""
    return available_bytes * layers // regions


def refuse_layers(specs: dict[str, Any]) -> None:
    """Check that layers may take turns: all of one kind, each attending to all of its tokens.

    Raises:
        UnsupportedEngine: names the layer that may not.
    """
    sizes: dict[int, str] = {}
    for name, spec in specs.items():
        windows = ("sliding_window", "attention_chunk_size")
        if any(getattr(spec, window, None) for window in windows):
            raise UnsupportedEngine(
                f"layer {name}: sliding-window or chunked attention layers are not supported"
            )
        if not hasattr(spec, "head_size"):
            raise UnsupportedEngine(
                f"layer {name}: a {type(spec).__name__} is not attention; hybrid models are not "
                "supported"
            )
        sizes.setdefault(spec.page_size_bytes, name)
    if len(sizes) > 1:
        names = ", ".join(f"{name}: {size} bytes a block" for size, name in sizes.items())
        raise UnsupportedEngine(f"layers of different sizes cannot take turns ({names})")


def aliased(plan: KVCacheConfig, regions: int, available_bytes: int) -> tuple[KVCacheConfig, int]:
    """The plan with its layers placed in ``regions`` regions of one allocation.

    Returns:
        The new plan, and the bytes it takes. vLLM checked the planned figure, which was raised;
        so the real one is checked here.

    Raises:
        UnsupportedEngine: a cache layout without one run per layer, several cache groups, or more
            memory than there is.
    """
    if len(plan.kv_cache_groups) != 1:
        raise UnsupportedEngine(
            f"the model has {len(plan.kv_cache_groups)} KV cache groups (sliding-window or hybrid "
            "layers); only models with one are supported"
        )
    (spread,) = {(t.layer_stride, t.block_stride) for t in plan.kv_cache_tensors} or {(0, 0)}
    layer_stride, block_stride = spread
    region_bytes = block_stride * plan.num_blocks
    if not layer_stride or layer_stride < region_bytes:
        raise UnsupportedEngine(
            "vLLM's KV cache keeps all layers of a block together; layers can take turns only "
            "where each has a run of its own: set engine.env VLLM_KV_CACHE_LAYOUT = LBHNC, or "
            "engine.layer_aliasing = false"
        )
    size = regions * layer_stride
    if size > available_bytes:
        raise UnsupportedEngine(
            f"{regions} regions of {layer_stride:,} bytes do not fit {available_bytes:,} bytes"
        )
    names = [name for tensor in plan.kv_cache_tensors for name in tensor.layers]
    first = plan.kv_cache_tensors[0]
    tensors = [
        dataclasses.replace(
            first,
            size=size,
            layers=[name],
            layer_stride=layer_stride,
            offset=(layer % regions) * layer_stride,
        )
        for name, layer in sorted(layer_numbers(names).items(), key=lambda item: item[1])
    ]
    return dataclasses.replace(plan, kv_cache_tensors=tensors), size


def regions_of(config: ClusterConfig, role: Role, cache: DeviceCache) -> Regions | None:
    """The ledger of layers that take turns, None where each has memory of its own.

    Raises:
        UnsupportedEngine: the cache is not laid out as the cluster file says.
    """
    layers = cache.layout.num_layers
    regions = config.layer_regions(role, layers)
    expected = [cache.layer_addresses[layer % regions] for layer in range(layers)]
    if cache.regions != regions or list(cache.layer_addresses) != expected:
        raise UnsupportedEngine(
            f"{layers} layers lie in {cache.regions} regions, not {regions}: start vLLM with "
            "--worker-cls dualpath.engine.worker.DualPathWorker, or set engine.layer_aliasing = "
            "false"
        )
    return Regions(layers, regions) if regions < layers else None
