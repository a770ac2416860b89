"""Who an engine is: which weights, which physical KV layout. Both go into every block's key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash
from vllm.version import __version__ as vllm_version

from dualpath.blocks import BlockLayout
from dualpath.engine.assemble import layer_numbers
from dualpath.transfer.hbm import DeviceCache

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 1 << 16
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_TRANSIENT: Final = {"_name_or_path", "name_or_path", "transformers_version"}


class UnsupportedEngine(RuntimeError):
    """This model or vLLM setting cannot be served; the message names it."""


def model_digest(path: str, hf_config: dict[str, object]) -> str:
    """Identity of a model's configuration and weights.

    For a folder: its configuration, and of every weights file the name, the size and 64 evenly
    spaced samples of 64 KiB. Reading hundreds of gigabytes in full at every start would cost
    minutes; two different fine-tunes differ in nearly every sample. A name that is no folder
    stands for itself: then ``revision`` has to tell weights apart.
    """
    digest = xxhash.xxh3_128()
    config = {key: value for key, value in hf_config.items() if key not in _TRANSIENT}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    folder = Path(path)
    if not folder.is_dir():
        digest.update(path.encode())
        return digest.hexdigest()
    files = sorted({file for pattern in _WEIGHT_PATTERNS for file in folder.glob(pattern)})
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(sample * max(0, size - _SAMPLE_BYTES) // max(1, _SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def describe_cache(
    kv_caches: dict[str, torch.Tensor],
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_tokens: int,
) -> tuple[DeviceCache, str]:
    """Addresses and layout id of the cache vLLM allocated.

    Raises:
        UnsupportedEngine: more than one cache group, tensor or pipeline parallelism, speculative
            decoding, a layer that is not plain full attention, or a cache whose blocks are not
            one contiguous run per layer.
    """
    _refuse(config, kv_cache_config)
    engine_block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    num_blocks = kv_cache_config.num_blocks
    names = sorted(kv_caches, key=layer_numbers(kv_caches).__getitem__)
    first = kv_caches[names[0]]
    addresses = []
    strides = set()
    for name in names:
        tensor = kv_caches[name]
        if tensor.shape[0] % num_blocks or not tensor.is_contiguous():
            raise UnsupportedEngine(
                f"layer {name}: the cache of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} does not keep each block in one run"
            )
        addresses.append(tensor.data_ptr())
        strides.add(tensor.numel() * tensor.element_size() // num_blocks)
    if len(strides) != 1:
        raise UnsupportedEngine(f"layers have blocks of different sizes: {sorted(strides)} bytes")
    (stride,) = strides
    if stride % engine_block_tokens:
        raise UnsupportedEngine(
            f"a block of {stride} bytes does not divide into {engine_block_tokens} tokens"
        )
    layout = BlockLayout(
        num_layers=len(names),
        block_tokens=block_tokens,
        engine_block_tokens=engine_block_tokens,
        token_layer_bytes=stride // engine_block_tokens,
    )
    device = first.device.index if first.is_cuda else None
    cache = DeviceCache(tuple(addresses), stride, num_blocks, layout, device)
    return cache, _layout_id(first, config, names[0], engine_block_tokens)


def _refuse(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = config.parallel_config
    if parallel.tensor_parallel_size != 1 or parallel.pipeline_parallel_size != 1:
        raise UnsupportedEngine(
            "one engine drives one GPU here: tensor and pipeline parallel sizes must be 1, got "
            f"{parallel.tensor_parallel_size} and {parallel.pipeline_parallel_size}"
        )
    if config.speculative_config is not None:
        raise UnsupportedEngine("speculative decoding is not supported: turn it off")
    if config.cache_config.enable_prefix_caching:
        raise UnsupportedEngine(
            "vLLM's own prefix cache must be off (--no-enable-prefix-caching): it would answer "
            "hits that DualPath does not know of"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedEngine(
            f"the model has {len(groups)} KV cache groups (sliding-window or hybrid layers); "
            "only models with one are supported"
        )
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise UnsupportedEngine("sliding-window or chunked attention layers are not supported")


def _layout_id(tensor: torch.Tensor, config: VllmConfig, layer: str, block_tokens: int) -> str:
    """Everything that decides the order of bytes inside a block.

    The CPU backend packs blocks differently by instruction set, and nothing promises that two
    versions of vLLM pack alike, so both are part of it.
    """
    attention = config.compilation_config.static_forward_context[layer]
    backend = attention.get_attn_backend()
    packing = ""
    if tensor.device.type == "cpu":
        packing = _cpu_packing(tensor, config, block_tokens)
    return "/".join(
        (
            f"vllm-{vllm_version}",
            backend.get_name(),
            packing,
            "x".join(str(size) for size in tensor.shape[1:]),
            "x".join(str(size) for size in tensor.stride()[1:]),
            f"b{block_tokens}",
        )
    )


def _cpu_packing(tensor: torch.Tensor, config: VllmConfig, block_tokens: int) -> str:
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415 - only importable on CPU

    model = config.model_config
    return str(
        cpu_attn._get_attn_isa(
            tensor.dtype, block_tokens, model.get_head_size(), config.cache_config.cache_dtype
        )
    )
