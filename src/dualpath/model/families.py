"""Architectures whose KV geometry and weights this project knows how to count.

A new decoder of a known shape is one new line here. Names are those that a Hugging Face
``config.json`` gives under ``architectures``.
"""

from __future__ import annotations

import enum
from typing import Final


class Family(enum.Enum):
    """How an architecture's attention and feed-forward layers are built."""

    GATED = "gated"
    """Grouped-query attention, three-matrix (gated) feed-forward."""
    PLAIN = "plain"
    """Grouped-query attention, two-matrix feed-forward."""
    MOE_QWEN = "qwen-moe"
    """Gated experts, counts under ``num_experts``; some layers may be dense."""
    MOE_MIXTRAL = "mixtral"
    """Gated experts in every layer, counts under ``num_local_experts``."""
    MOE_DEEPSEEK = "deepseek"
    """Multi-head latent attention; leading dense layers, then routed and shared experts."""


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family.GATED,
    "MistralForCausalLM": Family.GATED,
    "Qwen2ForCausalLM": Family.GATED,
    "Qwen3ForCausalLM": Family.GATED,
    "Phi3ForCausalLM": Family.GATED,
    "GemmaForCausalLM": Family.GATED,
    "GraniteForCausalLM": Family.GATED,
    "SmolLM3ForCausalLM": Family.GATED,
    "Starcoder2ForCausalLM": Family.PLAIN,
    "GPTNeoXForCausalLM": Family.PLAIN,
    "Qwen2MoeForCausalLM": Family.MOE_QWEN,
    "Qwen3MoeForCausalLM": Family.MOE_QWEN,
    "MixtralForCausalLM": Family.MOE_MIXTRAL,
    "DeepseekV2ForCausalLM": Family.MOE_DEEPSEEK,
    "DeepseekV3ForCausalLM": Family.MOE_DEEPSEEK,
}

STATEFUL_FIELDS: Final[tuple[str, ...]] = (
    "ssm_cfg", "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size",
    "hybrid_override_pattern", "attn_layer_period", "layers_block_type", "block_types",
    "full_attention_interval", "linear_num_key_heads", "linear_attn_config", "attn_type_list",
)  # fmt: skip
"""Fields by which hybrid and state-space models give themselves away: part of their state is not
one KV entry per token, so bytes per token are not defined."""
