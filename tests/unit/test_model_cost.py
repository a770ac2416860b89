"""FLOPs and KV bytes against the published Table 1, a slow second count, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.model import (
    PRESETS,
    AttentionTerm,
    KvRecord,
    KvTerm,
    ModelCost,
    ModelFacts,
    UnsupportedModel,
    cost_from_config_json,
    preset_cost,
)
from dualpath.model.cost import pairs
from dualpath.model.trend import GENERATIONS, decline

pytestmark = pytest.mark.unit

K = 1024
TABLE_1 = {
    "qwen2.5-32b": (117, 267, 0.01),
    "gpt-oss-120b": (47, 95, 0.01),
    "qwen3-235b": (39, 60, 0.01),
    "ds-v3.2": (13, 36, 0.05),
    "ds-v3": (4.8, 5.8, 0.12),
}
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 10, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL_WEIGHTS = 4 * (8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 16) + 8 * 10


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name: str) -> None:
    at_16k, at_64k, tolerance = TABLE_1[name]
    cost = preset_cost(name)
    assert cost.table1_gb_per_pflop(16 * K, 429) == pytest.approx(at_16k, rel=tolerance)
    assert cost.table1_gb_per_pflop(64 * K, 429) == pytest.approx(at_64k, rel=tolerance)


def test_the_papers_22_gb_per_pflop_at_the_mean_context_of_64k() -> None:
    assert preset_cost("ds-v3.2").table1_gb_per_pflop(32_721, 429) == pytest.approx(22, rel=0.05)


def test_bytes_and_parameters_of_the_presets() -> None:
    of = {name: preset_cost(name) for name in PRESETS}
    assert of["ds-v3.2"].kv_bytes_per_token == (576 + 128) * 61
    assert preset_cost("ds-v3.2", record=KvRecord.FLASHMLA).kv_bytes_per_token == 788 * 61
    assert of["ds-v3"].kv_bytes_per_token == 656 * 61
    assert of["ds-27b"].kv_bytes_per_token == 19_200
    assert preset_cost("ds-27b", record=KvRecord.FLASHMLA).kv_bytes_per_token == 21_720
    assert of["ds-27b"].active_parameters == pytest.approx(4.29e9, rel=0.002)
    assert of["qwen2.5-32b"].kv_bytes_per_token == 262_144
    assert of["qwen2.5-32b"].active_parameters == pytest.approx(31.98e9, rel=5e-4)
    assert of["gpt-oss-120b"].active_parameters == pytest.approx(5.13e9, rel=0.002)
    assert of["gpt-oss-120b"].kv_bytes_per_token == 18 * 2 * 8 * 64
    assert of["gpt-oss-120b"].kv_bytes(64 * K) == 18 * 1024 * (64 * K + 128)


def test_a_sparse_indexer_caps_attention_but_not_itself() -> None:
    cost = preset_cost("ds-v3.2")
    main, indexer = cost.attention
    assert main == AttentionTerm(128 * 2 * (576 + 512) * 61, 2048)
    assert indexer == AttentionTerm(2 * 64 * 128 * 61, None)
    assert cost.flops_per_token_per_context == indexer.flops_per_context_token
    grown = cost.flops_at(64 * K) - cost.flops_at(16 * K)
    assert grown == 48 * K * indexer.flops_per_context_token


TOKENS = st.integers(min_value=0, max_value=60)


@settings(deadline=None)
@given(TOKENS, TOKENS, st.none() | st.integers(min_value=1, max_value=80))
def test_token_pairs_by_adding_them_up(cached: int, new: int, cap: int | None) -> None:
    each = [cached + n if cap is None else min(cached + n, cap) for n in range(1, new + 1)]
    assert pairs(cached, new, cap) == sum(each)


@settings(deadline=None)
@given(st.sampled_from(list(PRESETS)), TOKENS, TOKENS, TOKENS)
def test_a_prefill_in_two_chunks_costs_the_same(name: str, c: int, one: int, two: int) -> None:
    cost = preset_cost(name)
    c = c * 64
    whole = cost.prefill_flops(c, one + two)
    assert cost.prefill_flops(c, one) + cost.prefill_flops(c + one, two) == whole
    assert cost.prefill_flops(c, 1) == cost.flops_at(c + 1)
    assert cost.prefill_s(c, one, 5e14) == cost.prefill_flops(c, one) / 5e14
    assert cost.attention_s(c, one, 5e14) == cost.attention_flops(c, one) / 5e14


def test_a_small_model_by_hand() -> None:
    cost = cost_from_config_json(SMALL, name="small")
    assert cost == ModelCost(
        name="small",
        num_layers=4,
        flops_base_per_token=2 * SMALL_WEIGHTS,
        attention=(AttentionTerm(4 * 4 * 2 * 4),),
        kv=(KvTerm(2 * 2 * 2 * 2 * 4),),
    )
    assert cost.kv_bytes_per_token_layer == 16
    assert cost_from_config_json(SMALL, kv_dtype="fp8").kv_bytes_per_token == 32


def test_costs_and_facts_agree_where_both_speak() -> None:
    for name in ("qwen2.5-32b", "qwen3-235b", "ds-v3"):
        preset = PRESETS[name]
        facts = ModelFacts.from_config_json(preset.config, kv_dtype=preset.kv_dtype)
        cost = preset_cost(name, record=KvRecord.PLAIN)
        assert cost.kv_bytes_per_token == facts.token_bytes
        assert cost.active_parameters == facts.active_parameters
        assert cost.num_layers == facts.num_layers


def layers_with_window(change: dict[str, Any]) -> dict[int | None, int]:
    cost = cost_from_config_json({**SMALL, **change})
    return {part.window_tokens: part.bytes_per_token // 16 for part in cost.kv}


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, {None: 4}),
        ({"sliding_window": 32}, {32: 4}),
        ({"sliding_window": 32, "use_sliding_window": False}, {None: 4}),
        ({"sliding_window": 32, "max_window_layers": 3}, {None: 3, 32: 1}),
        (
            {"sliding_window": 32, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            {None: 1, 32: 3},
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 32}, {None: 2, 32: 2}),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32}, {32: 4}),
        ({"architectures": ["Cohere2ForCausalLM"], "sliding_window": 32}, {None: 1, 32: 3}),
    ],
)
def test_which_layers_slide(change: dict[str, Any], layers: dict[int | None, int]) -> None:
    assert layers_with_window(change) == layers


def test_a_window_bounds_cache_and_work() -> None:
    cost = cost_from_config_json({**SMALL, "sliding_window": 32})
    assert cost.kv_bytes_per_token == 0
    assert cost.kv_bytes(1000) == 32 * 64
    assert cost.flops_at(1000) == cost.flops_at(32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["WeirdForCausalLM"]}, "architectures: 'WeirdForCausalLM' is not known"),
        ({"architectures": []}, "architectures: must be a list"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": 9}, "head_dim: missing"),
        ({"torch_dtype": "int3"}, "dtype: must be one of"),
        ({"mamba_d_state": 16}, "mamba_d_state: state-space"),
        ({"layer_types": ["full_attention"]}, "layer_types: lists 1 layers of 4"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types[0]: 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window: is missing"),
        ({"architectures": ["GptOssForCausalLM"]}, "num_local_experts: is missing"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_line(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        cost_from_config_json({**SMALL, **change})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_live_path_still_refuses_what_it_cannot_serve() -> None:
    for name in ("gpt-oss-120b", "ds-v3.2", "ds-27b"):
        with pytest.raises(UnsupportedModel):
            ModelFacts.from_config_json(PRESETS[name].config, kv_dtype="fp8")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'gpt-5' is not a known model; known: ds-v3\.2, "):
        preset_cost("gpt-5")


def test_io_per_computation_fell_by_14_4() -> None:
    assert decline() == pytest.approx(14.4, rel=0.005)
    ratios = [generation.gb_per_pflop for generation in GENERATIONS]
    assert ratios == sorted(ratios, reverse=True)
    assert all(generation.source for generation in GENERATIONS)


def test_model_communication_of_a_token() -> None:
    assert preset_cost("ds-v3.2").collective_bytes_per_token == 58 * 8 * 7168 * 3
    assert preset_cost("qwen3-235b").collective_bytes_per_token == 94 * 8 * 4096 * 3
    assert preset_cost("gpt-oss-120b").collective_bytes_per_token == 36 * 4 * 2880 * 3
    assert preset_cost("qwen2.5-32b").collective_bytes_per_token == 0
