"""Costs of any known architecture from its ``config.json``.

Wider than ``facts``, on purpose: the live engine refuses sliding windows and sparse-attention
indexers because it cannot serve them, but what they cost can be counted, and the simulator and the
planner need it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dualpath.model.cost import AttentionTerm, KvTerm, ModelCost
from dualpath.model.facts import DTYPE_BYTES
from dualpath.model.families import FAMILIES, STATEFUL_FIELDS, Family
from dualpath.model.reader import Fields, UnsupportedModel, architecture_of, load_config
from dualpath.model.weights import active_parameters, expert_hops

COST_FAMILIES: Final[dict[str, Family]] = {
    **FAMILIES,
    "GptOssForCausalLM": Family.MOE_MIXTRAL,
    "DeepseekV32ForCausalLM": Family.MOE_DEEPSEEK,
    "Gemma2ForCausalLM": Family.GATED,
    "Gemma3ForCausalLM": Family.GATED,
    "Cohere2ForCausalLM": Family.GATED,
    "Olmo3ForCausalLM": Family.GATED,
}
"""Architectures that can be counted; those not in ``FAMILIES`` cannot be served."""

FULL_LAYER_EVERY: Final[dict[str, int]] = {
    "GptOssForCausalLM": 2, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6,
    "Cohere2ForCausalLM": 4, "Olmo3ForCausalLM": 4,
}  # fmt: skip
"""Every so many layers one sees the whole context, where the file does not list its layers
(defaults of the Hugging Face configuration classes)."""

_SCALE_BYTES: Final = 4
_SCALE_GROUP: Final = 128
_ROPE_BYTES: Final = 2
_DISPATCH_BYTES: Final = 1
_COMBINE_BYTES: Final = 2


class KvRecord(enum.Enum):
    """How an MLA cache entry is laid out."""

    PLAIN = "plain"
    """Every element in the cache's element type: 576 (+ 128 of the indexer) bytes in FP8."""
    FLASHMLA = "flashmla"
    """FlashMLA's FP8 record: the latent in FP8 with a float32 scale per 128 elements, the rotary
    key in BF16: 656 bytes; the indexer's key in FP8 with its scale: 132."""


def cost_from_config_json(
    source: Mapping[str, Any] | str | Path,
    *,
    name: str = "",
    kv_dtype: str | None = None,
    record: KvRecord = KvRecord.PLAIN,
) -> ModelCost:
    """Costs of the model of a ``config.json``.

    Args:
        source: its decoded object, its path, or the folder it lies in.
        name: what to call the model; the architecture's name when empty.
        kv_dtype: element type of the cache; the model's own ``dtype`` when None.
        record: layout of an MLA cache entry; has no meaning for others.

    Raises:
        UnsupportedModel: one line naming the file, the architecture and the field.
    """
    values, where = load_config(source)
    architecture = architecture_of(values, where)
    fields = Fields(values, f"{where}: {architecture}")
    for field in STATEFUL_FIELDS:
        if fields.has(field):
            raise fields.error(field, "state-space and hybrid models are not supported")
    family = COST_FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"{where}: architectures: {architecture!r} is not known; known: "
            f"{', '.join(sorted(COST_FAMILIES))}"
        )
    dtype = kv_dtype or values.get("dtype") or values.get("torch_dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fields.error("dtype", f"must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    label = name or architecture
    if family is Family.MOE_DEEPSEEK:
        return _latent(fields, label, DTYPE_BYTES[dtype], record)
    return _grouped(fields, label, architecture, family, DTYPE_BYTES[dtype])


def _grouped(
    fields: Fields, name: str, architecture: str, family: Family, element_bytes: int
) -> ModelCost:
    """MHA and GQA: scores and weighted values, 2 FLOPs a multiply-add each."""
    layers, heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error("head_dim", f"missing, and {hidden} / {heads} heads is not whole")
    head_dim = fields.count("head_dim", hidden // heads)
    windows = list(_windows(fields, architecture, layers))
    attention, kv = [], []
    for window in sorted(set(windows), key=lambda tokens: (tokens is not None, tokens or 0)):
        alike = windows.count(window)
        attention.append(AttentionTerm(4 * heads * head_dim * alike, window))
        kv.append(KvTerm(2 * kv_heads * head_dim * element_bytes * alike, window))
    return ModelCost(
        name=name,
        num_layers=layers,
        flops_base_per_token=2 * active_parameters(fields, family, head_dim),
        attention=tuple(attention),
        kv=tuple(kv),
        collective_bytes_per_token=_expert_bytes(fields, family),
    )


def _latent(fields: Fields, name: str, element_bytes: int, record: KvRecord) -> ModelCost:
    """MLA with the up-projections absorbed into queries and outputs, so that attention works on
    the latents themselves; with an indexer, only on the ``index_topk`` it selects."""
    layers, heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads")
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    weights = active_parameters(fields, Family.MOE_DEEPSEEK, rank + rope)
    top = fields.count("index_topk") if fields.has("index_topk") else None
    attention = [AttentionTerm(2 * heads * (2 * rank + rope) * layers, top)]
    if record is KvRecord.FLASHMLA:
        entry = _scaled(rank) + _ROPE_BYTES * rope
    else:
        entry = (rank + rope) * element_bytes
    if top is not None:
        index_heads, index_dim = fields.count("index_n_heads"), fields.count("index_head_dim")
        attention.append(AttentionTerm(2 * index_heads * index_dim * layers))
        weights += layers * _indexer_weights(fields, index_heads, index_dim)
        scaled = record is KvRecord.FLASHMLA
        entry += _scaled(index_dim) if scaled else index_dim * element_bytes
    return ModelCost(
        name=name,
        num_layers=layers,
        flops_base_per_token=2 * weights,
        attention=tuple(attention),
        kv=(KvTerm(entry * layers),),
        collective_bytes_per_token=_expert_bytes(fields, Family.MOE_DEEPSEEK),
    )


def _expert_bytes(fields: Fields, family: Family) -> int:
    hidden = fields.count("hidden_size")
    return expert_hops(fields, family) * hidden * (_DISPATCH_BYTES + _COMBINE_BYTES)


def _indexer_weights(fields: Fields, heads: int, head_dim: int) -> int:
    """Query, key and head-weight projections of one layer's indexer (DeepSeek-V3.2)."""
    hidden = fields.count("hidden_size")
    query_input = fields.whole("q_lora_rank") or hidden
    return query_input * heads * head_dim + hidden * head_dim + hidden * heads


def _scaled(elements: int) -> int:
    """Bytes of FP8 elements with their scales."""
    return elements + _SCALE_BYTES * -(-elements // _SCALE_GROUP)


def _windows(fields: Fields, architecture: str, layers: int) -> Iterator[int | None]:
    """Each layer's window in tokens; None where it sees everything."""
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise fields.error("layer_types", f"lists {len(kinds)} layers of {layers}")
        for index, kind in enumerate(kinds):
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.error(f"layer_types[{index}]", f"{kind!r} layers are not supported")
            yield None if kind == "full_attention" else fields.count("sliding_window")
        return
    # Qwen configurations carry a window and switch it off by a second field.
    if not fields.has("sliding_window") or fields.values.get("use_sliding_window") is False:
        yield from (None for _ in range(layers))
        return
    window = fields.count("sliding_window")
    if architecture in FULL_LAYER_EVERY:
        every = fields.count("sliding_window_pattern", FULL_LAYER_EVERY[architecture])
        yield from (None if (n + 1) % every == 0 else window for n in range(layers))
    else:
        first = fields.whole("max_window_layers")
        yield from (None if n < first else window for n in range(layers))
