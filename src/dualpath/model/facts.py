"""Facts of a model that its ``config.json`` gives: geometry, KV bytes, active parameters.

Pure arithmetic. KV bytes decide buffer sizes, SNIC load and hit bytes everywhere else, so a model
whose KV cannot be counted for certain is refused by name rather than guessed at.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dualpath.model.families import FAMILIES, STATEFUL_FIELDS, Family
from dualpath.model.reader import Fields, UnsupportedModel, architecture_of, load_config
from dualpath.model.weights import active_parameters

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1,
}  # fmt: skip
"""Bytes of one element by the name a configuration uses."""


class Attention(enum.Enum):
    """What one layer keeps of a token."""

    MHA = "mha"
    """A key and a value for every query head."""
    GQA = "gqa"
    """A key and a value for every group of query heads."""
    MLA = "mla"
    """One latent vector and one rotary key, shared by all heads."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Geometry of one model.

    Attributes:
        architecture: Hugging Face class name.
        attention: kind of attention, the same in every layer.
        num_layers, num_heads, num_kv_heads: counts. ``num_kv_heads`` is 1 for MLA.
        head_dim: elements of one key head; for MLA the width of the cached entry.
        kv_elements_per_token_layer: elements one token leaves in one layer's cache:
            ``2 * num_kv_heads * head_dim``, or ``kv_lora_rank + qk_rope_head_dim`` for MLA.
        kv_dtype, kv_dtype_bytes: element type of the cache.
        hidden_size, vocab_size: widths.
        max_position: longest context the model was made for, None when not stated.
        active_parameters: weights that multiply one token: attention, the experts it is routed
            to, shared experts, router and LM head; without embedding, norms and biases.
    """

    architecture: str
    attention: Attention
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_elements_per_token_layer: int
    kv_dtype: str
    kv_dtype_bytes: int
    hidden_size: int
    vocab_size: int
    max_position: int | None
    active_parameters: int

    @property
    def token_layer_bytes(self) -> int:
        """KV bytes of one token in one layer, all tensor-parallel ranks together."""
        return self.kv_elements_per_token_layer * self.kv_dtype_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.num_layers * self.token_layer_bytes

    @classmethod
    def from_config_json(
        cls, source: Mapping[str, Any] | str | Path, *, kv_dtype: str | None = None
    ) -> ModelFacts:
        """Facts from a decoded ``config.json``, its path, or the folder it lies in.

        Args:
            source: mapping or path.
            kv_dtype: element type of the cache; the model's own ``dtype`` when None.

        Raises:
            UnsupportedModel: unreadable, unknown architecture, a field missing or wrong, or layers
                that do not keep one KV entry per token (sliding window, state space, hybrid).
        """
        values, where = load_config(source)
        return _facts(values, where, kv_dtype)


def _facts(values: Mapping[str, Any], source: str, kv_dtype: str | None) -> ModelFacts:
    architecture = architecture_of(values, source)
    fields = Fields(values, f"{source}: {architecture}")
    _refuse_windows_and_state(fields)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"{source}: architectures: {architecture!r} is not known; known: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    dtype = kv_dtype or values.get("dtype") or values.get("torch_dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fields.error("dtype", f"must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if family is Family.MOE_DEEPSEEK:
        kv_heads = 1
        head_dim = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
        attention, elements = Attention.MLA, head_dim
    else:
        kv_heads = fields.count("num_key_value_heads", heads)
        head_dim = fields.count("head_dim", _divide(fields, hidden, heads))
        attention = Attention.MHA if kv_heads == heads else Attention.GQA
        elements = 2 * kv_heads * head_dim
    return ModelFacts(
        architecture=architecture,
        attention=attention,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_elements_per_token_layer=elements,
        kv_dtype=dtype,
        kv_dtype_bytes=DTYPE_BYTES[dtype],
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        max_position=fields.whole("max_position_embeddings") or None,
        active_parameters=active_parameters(fields, family, head_dim),
    )


def _divide(fields: Fields, hidden: int, heads: int) -> int | None:
    """Head width by the usual rule; only needed when ``head_dim`` is not given."""
    if fields.has("head_dim"):
        return None
    if hidden % heads:
        raise fields.error("head_dim", f"missing, and {hidden} / {heads} heads is not whole")
    return hidden // heads


def _refuse_windows_and_state(fields: Fields) -> None:
    """Refuse layers whose cache is not one entry for every token of the context."""
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        for index, kind in enumerate(kinds):
            if kind != "full_attention":
                raise fields.error(f"layer_types[{index}]", f"{kind!r} layers are not supported")
    # Qwen configurations carry a window and switch it off by a second field.
    elif fields.has("sliding_window") and fields.values.get("use_sliding_window") is not False:
        window = fields.values["sliding_window"]
        raise fields.error("sliding_window", f"{window!r}: sliding windows are not supported")
    for name in STATEFUL_FIELDS:
        if fields.has(name):
            raise fields.error(name, "state-space and hybrid models are not supported")
    if fields.has("index_topk"):
        raise fields.error("index_topk", "the sparse-attention indexer's cache is not supported")
