"""A tiny random DeepSeek-V3: latent attention (MLA), whose KV is one vector a token and layer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

LAYERS = 4


def make(folder: Path, tokenizer_of: Path) -> Path:
    """Write one with the tokenizer of another model; 512 + 64 values a token and layer, the only
    size vLLM's CPU kernel takes."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    config = DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )
    torch.manual_seed(7)
    DeepseekV3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    import sys

    make(Path(sys.argv[1]), Path(sys.argv[2]))
