"""Parameters that take part in computing one token.

Counted from matrix shapes; embeddings (a look-up), norms and biases are left out, the LM head is
in: this is the ``a / 2`` of the cost ``a + b * context`` FLOPs a token.
"""

from __future__ import annotations

from dualpath.model.families import Family
from dualpath.model.reader import Fields


def active_parameters(fields: Fields, family: Family, head_dim: int) -> int:
    """Weights one token is multiplied by, all layers and the LM head.

    Args:
        fields: the model's configuration.
        family: its shape.
        head_dim: elements of a key head (unused for MLA).

    Raises:
        UnsupportedModel: a needed field is missing.
    """
    layers, hidden = fields.count("num_hidden_layers"), fields.count("hidden_size")
    head = hidden * fields.count("vocab_size")
    if family is Family.MOE_DEEPSEEK:
        attention = _latent_attention(fields, hidden)
    else:
        attention = _grouped_attention(fields, hidden, head_dim)
    return head + layers * attention + _feed_forward(fields, family, layers, hidden)


def _grouped_attention(fields: Fields, hidden: int, head_dim: int) -> int:
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    return hidden * head_dim * (2 * heads + 2 * kv_heads)


def _latent_attention(fields: Fields, hidden: int) -> int:
    """DeepSeek-V2 paper, section 2.1: down and up projections of queries and of the latent."""
    heads = fields.count("num_attention_heads")
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query_width = heads * (nope + rope)
    query_rank = fields.whole("q_lora_rank")
    query = query_rank * (hidden + query_width) if query_rank else hidden * query_width
    latent = hidden * (rank + rope) + rank * heads * (nope + value)
    return query + latent + heads * value * hidden


def _feed_forward(fields: Fields, family: Family, layers: int, hidden: int) -> int:
    """All layers' feed-forward weights that one token meets."""
    if family is Family.PLAIN:
        return layers * 2 * hidden * fields.count("intermediate_size", 4 * hidden)
    if family is Family.GATED:
        return layers * 3 * hidden * fields.count("intermediate_size")
    if family is Family.MOE_MIXTRAL:
        experts, chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok")
        expert = 3 * hidden * fields.count("intermediate_size")
        return layers * (hidden * experts + chosen * expert)
    if family is Family.MOE_DEEPSEEK:
        return _deepseek_experts(fields, layers, hidden)
    return _qwen_experts(fields, layers, hidden)


def expert_hops(fields: Fields, family: Family) -> int:
    """Routed experts one token visits in all layers together; 0 for a dense model.

    Raises:
        UnsupportedModel: a needed field is missing.
    """
    layers = fields.count("num_hidden_layers")
    sparse = {
        Family.MOE_MIXTRAL: layers,
        Family.MOE_DEEPSEEK: _deepseek_sparse(fields, layers),
        Family.MOE_QWEN: _qwen_sparse(fields, layers),
    }.get(family, 0)
    return sparse * fields.count("num_experts_per_tok") if sparse else 0


def _deepseek_sparse(fields: Fields, layers: int) -> int:
    if not fields.has("n_routed_experts"):
        return 0
    every = fields.count("moe_layer_freq", 1)
    first = fields.whole("first_k_dense_replace")
    return sum(1 for layer in range(layers) if layer >= first and layer % every == 0)


def _qwen_sparse(fields: Fields, layers: int) -> int:
    step = fields.count("decoder_sparse_step", 1)
    dense_layers = fields.values.get("mlp_only_layers") or []
    return sum(1 for n in range(layers) if n not in dense_layers and (n + 1) % step == 0)


def _deepseek_experts(fields: Fields, layers: int, hidden: int) -> int:
    dense_width = fields.count("intermediate_size")
    sparse = _deepseek_sparse(fields, layers)
    if not sparse:
        return layers * 3 * hidden * dense_width
    experts = fields.count("num_experts_per_tok") + fields.whole("n_shared_experts")
    routed = hidden * fields.count("n_routed_experts")
    expert = 3 * hidden * fields.count("moe_intermediate_size")
    return (layers - sparse) * 3 * hidden * dense_width + sparse * (routed + experts * expert)


def _qwen_experts(fields: Fields, layers: int, hidden: int) -> int:
    sparse = _qwen_sparse(fields, layers)
    routed = hidden * fields.count("num_experts")
    chosen = fields.count("num_experts_per_tok") * fields.count("moe_intermediate_size")
    shared = fields.whole("shared_expert_intermediate_size")
    dense = 0
    if sparse < layers:
        dense = (layers - sparse) * 3 * hidden * fields.count("intermediate_size")
    return dense + sparse * (routed + 3 * hidden * (chosen + shared))
