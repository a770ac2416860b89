"""Facts against numbers worked by hand from published configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.model import Attention, ModelFacts, UnsupportedModel

pytestmark = pytest.mark.unit

SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN25_32B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
    "vocab_size": 152064, "sliding_window": 131072, "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [],
    "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "sliding_window": None,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "vocab_size": 129280, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_smollm2_in_float32() -> None:
    facts = ModelFacts.from_config_json(SMOLLM2_135M, kv_dtype="float32")
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads) == (30, 9, 3)
    assert facts.head_dim == 64
    assert facts.attention is Attention.GQA
    assert facts.token_layer_bytes == 2 * 3 * 64 * 4 == 1536
    assert facts.token_bytes == 46_080
    assert (facts.vocab_size, facts.max_position) == (49_152, 8192)
    # 30 * (576*576*2 + 2*576*192 + 3*576*1536) + 576*49152
    assert facts.active_parameters == 134_479_872


def test_cache_type_is_the_models_own_unless_given() -> None:
    assert ModelFacts.from_config_json(SMOLLM2_135M).token_bytes == 23_040
    assert ModelFacts.from_config_json(SMOLLM2_135M, kv_dtype="fp8").token_bytes == 11_520


def test_qwen25_32b() -> None:
    facts = ModelFacts.from_config_json(QWEN25_32B, kv_dtype="float16")
    assert facts.token_bytes == 262_144
    assert facts.active_parameters == pytest.approx(31.98e9, rel=5e-4)


def test_qwen3_moe_counts_only_the_chosen_experts() -> None:
    facts = ModelFacts.from_config_json(QWEN3_235B)
    assert facts.token_bytes == 2 * 4 * 128 * 2 * 94 == 192_512
    assert facts.active_parameters == pytest.approx(22e9, rel=0.03)


def test_deepseek_v3_keeps_one_latent_entry_per_token() -> None:
    facts = ModelFacts.from_config_json(DEEPSEEK_V3)
    assert facts.attention is Attention.MLA
    assert facts.kv_elements_per_token_layer == 576
    assert facts.token_bytes == 576 * 2 * 61 == 70_272
    assert facts.active_parameters == pytest.approx(37e9, rel=0.03)


def test_multi_head_attention_when_no_groups_are_given() -> None:
    config = {k: v for k, v in SMOLLM2_135M.items() if k != "num_key_value_heads"}
    facts = ModelFacts.from_config_json(config)
    assert facts.attention is Attention.MHA
    assert facts.kv_elements_per_token_layer == 2 * 9 * 64


def test_mixtral_active_parameters() -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "sliding_window": None, "dtype": "bfloat16",
    }  # fmt: skip
    facts = ModelFacts.from_config_json(config)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    layer = attention + 4096 * 8 + 2 * 3 * 4096 * 14336
    assert facts.active_parameters == 32 * layer + 4096 * 32000


def test_file_and_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    from_folder = ModelFacts.from_config_json(tmp_path)
    assert from_folder == ModelFacts.from_config_json(tmp_path / "config.json")
    assert from_folder == ModelFacts.from_config_json(DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["BambooForCausalLM"]}, "BambooForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"torch_dtype": "int3"}, "dtype"),
        ({"torch_dtype": None}, "dtype"),
        ({"num_attention_heads": 7}, "head_dim"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types[1]"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"index_topk": 2048}, "index_topk"),
    ],
)
def test_what_cannot_be_known_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        ModelFacts.from_config_json({**SMOLLM2_135M, **change})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mla_without_its_rank_is_refused_by_name() -> None:
    config = {k: v for k, v in DEEPSEEK_V3.items() if k != "kv_lora_rank"}
    with pytest.raises(UnsupportedModel, match=r"DeepseekV3ForCausalLM: kv_lora_rank"):
        ModelFacts.from_config_json(config)


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_unusable_files_give_one_line_with_the_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelFacts.from_config_json(path)
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        ModelFacts.from_config_json(tmp_path / "absent.json")
