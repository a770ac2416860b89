"""Models of the paper's evaluation: published geometry, as their ``config.json`` would give it.

Sources: the models' public configurations on Hugging Face (deepseek-ai/DeepSeek-V3,
deepseek-ai/DeepSeek-V3.2, Qwen/Qwen2.5-32B, Qwen/Qwen3-235B-A22B, openai/gpt-oss-120b); DS 27B
from arXiv 2602.21548, appendix A.2, which leaves its MLA widths and vocabulary unsaid: those of
DeepSeek-V3 are taken, with queries projected directly, which gives 4.29 B active parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dualpath.model.cost import ModelCost
from dualpath.model.describe import KvRecord, cost_from_config_json
from dualpath.model.reader import UnsupportedModel

_DEEPSEEK_V3: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip
_DEEPSEEK_V32: Final[dict[str, Any]] = {
    **_DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
_DS_27B: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288,
    "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 32,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "q_lora_rank": None, "n_routed_experts": 72, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "index_n_heads": 32, "index_head_dim": 64, "index_topk": 1024, "vocab_size": 129280,
}  # fmt: skip
_QWEN25_32B: Final[dict[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
    "vocab_size": 152064, "sliding_window": 131072, "use_sliding_window": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN3_235B: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [],
    "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "sliding_window": None,
    "max_position_embeddings": 40960,
}  # fmt: skip
_GPT_OSS_120B: Final[dict[str, Any]] = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "num_local_experts": 128, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and the element type and layout its cache has in the paper's Table 1."""

    config: dict[str, Any]
    kv_dtype: str
    record: KvRecord = KvRecord.PLAIN


PRESETS: Final[dict[str, Preset]] = {
    "ds-v3.2": Preset(_DEEPSEEK_V32, "fp8"),
    "ds-v3": Preset(_DEEPSEEK_V3, "fp8", KvRecord.FLASHMLA),
    "ds-27b": Preset(_DS_27B, "fp8"),
    "qwen2.5-32b": Preset(_QWEN25_32B, "float16"),
    "qwen3-235b": Preset(_QWEN3_235B, "fp8"),
    "gpt-oss-120b": Preset(_GPT_OSS_120B, "fp8"),
}
"""By the names that ``reproduce`` uses. The paper's 660B is ``ds-v3.2``."""


def preset_cost(name: str, *, record: KvRecord | None = None) -> ModelCost:
    """Costs of a preset.

    Args:
        name: a key of ``PRESETS``.
        record: layout of an MLA cache entry, where another than Table 1's is wanted.

    Raises:
        UnsupportedModel: no such preset.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise UnsupportedModel(f"{name!r} is not a known model; known: {', '.join(PRESETS)}")
    return cost_from_config_json(
        preset.config, name=name, kv_dtype=preset.kv_dtype, record=record or preset.record
    )
