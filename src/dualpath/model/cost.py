"""What tokens cost: FLOPs to compute them, bytes to keep them.

A token at context ``c`` (tokens before it) costs ``a + b * c`` FLOPs, ``a`` being twice the
active parameters (LM head in, embedding out) and ``b`` what attention does per earlier token. A
sliding window or a top-k selection caps the ``c`` of its own part of ``b``. Norms, activations and
the softmax are left out: under 1 % of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GIGA: Final = 1e9
PETA: Final = 1e15


@dataclass(frozen=True, slots=True)
class AttentionTerm:
    """A part of attention's work, of all layers that do it alike.

    Attributes:
        flops_per_context_token: FLOPs of one token for each earlier token it looks at.
        cap_tokens: most earlier tokens it looks at (a window, a top-k); None for all.
    """

    flops_per_context_token: int
    cap_tokens: int | None = None

    def flops(self, cached_tokens: int, new_tokens: int) -> int:
        """FLOPs of ``new_tokens`` tokens behind ``cached_tokens``, each looking at itself too."""
        return self.flops_per_context_token * pairs(cached_tokens, new_tokens, self.cap_tokens)

    def flops_at(self, context_tokens: int) -> int:
        """FLOPs of one token that looks at ``context_tokens`` tokens."""
        cap = self.cap_tokens
        return self.flops_per_context_token * (
            context_tokens if cap is None else min(context_tokens, cap)
        )


@dataclass(frozen=True, slots=True)
class KvTerm:
    """A part of the cache, of all layers that keep it alike.

    Attributes:
        bytes_per_token: KV bytes of one token in those layers together.
        window_tokens: how many of the latest tokens are kept; None for all.
    """

    bytes_per_token: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of one model.

    Attributes:
        name: for people.
        num_layers: layers that attend.
        flops_base_per_token: ``a``: FLOPs of a token without attention over earlier ones.
        attention: the parts of ``b``.
        kv: the parts of the cache.
        collective_bytes_per_token: model communication of a token, each direction: its hidden
            state to every routed expert it visits in FP8 and back in BF16, all of them taken to
            be on other GPUs; 0 for a dense model, whose engines share nothing.
    """

    name: str
    num_layers: int
    flops_base_per_token: int
    attention: tuple[AttentionTerm, ...]
    kv: tuple[KvTerm, ...]
    collective_bytes_per_token: int = 0

    @property
    def active_parameters(self) -> int:
        """Weights that multiply one token: ``a / 2``."""
        return self.flops_base_per_token // 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes by which a long context's cache grows with a token: layers with a window have
        reached it and grow no more. What storage moves per hit token."""
        return sum(part.bytes_per_token for part in self.kv if part.window_tokens is None)

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """``kv_bytes_per_token`` spread over all layers."""
        return self.kv_bytes_per_token / self.num_layers

    @property
    def flops_per_token_per_context(self) -> int:
        """``b`` of a long context: attention FLOPs of a token per earlier token, uncapped parts."""
        parts = (part for part in self.attention if part.cap_tokens is None)
        return sum(part.flops_per_context_token for part in parts)

    def kv_bytes(self, context_tokens: int) -> int:
        """Bytes of the cache of ``context_tokens`` tokens."""
        total = 0
        for part in self.kv:
            kept = part.window_tokens
            tokens = context_tokens if kept is None else min(context_tokens, kept)
            total += part.bytes_per_token * tokens
        return total

    def flops_at(self, context_tokens: int) -> int:
        """FLOPs of one token that looks at ``context_tokens`` tokens: ``a + b * context``."""
        work = sum(part.flops_at(context_tokens) for part in self.attention)
        return self.flops_base_per_token + work

    def attention_flops(self, cached_tokens: int, new_tokens: int) -> int:
        """Attention FLOPs of computing ``new_tokens`` tokens behind ``cached_tokens``.

        Exact sum over the new tokens; each looks at all before it and at itself.
        """
        return sum(part.flops(cached_tokens, new_tokens) for part in self.attention)

    def prefill_flops(self, cached_tokens: int, new_tokens: int) -> int:
        """All FLOPs of computing ``new_tokens`` tokens behind ``cached_tokens``."""
        base = self.flops_base_per_token * new_tokens
        return base + self.attention_flops(cached_tokens, new_tokens)

    def attention_s(self, cached_tokens: int, new_tokens: int, flops_per_s: float) -> float:
        """Seconds of that attention at an effective rate of ``flops_per_s``."""
        return self.attention_flops(cached_tokens, new_tokens) / flops_per_s

    def prefill_s(self, cached_tokens: int, new_tokens: int, flops_per_s: float) -> float:
        """Seconds of that prefill at an effective rate of ``flops_per_s``."""
        return self.prefill_flops(cached_tokens, new_tokens) / flops_per_s

    def table1_gb_per_pflop(self, context_tokens: int, append_tokens: int) -> float:
        """I/O a turn needs for its computation: Table 1 of arXiv 2602.21548.

        GB (1e9 bytes) of the cached context read, per PFLOP (1e15) of computing ``append_tokens``
        tokens, every one of which is taken to look at exactly ``context_tokens`` tokens.
        """
        flops = append_tokens * self.flops_at(context_tokens)
        return (self.kv_bytes(context_tokens) / GIGA) / (flops / PETA)


def pairs(cached_tokens: int, new_tokens: int, cap_tokens: int | None = None) -> int:
    """Sum of ``min(cached + i, cap)`` for i = 1 .. new: how many token pairs attention visits."""
    free = new_tokens
    if cap_tokens is not None:
        free = min(new_tokens, max(0, cap_tokens - cached_tokens))
    visited = free * cached_tokens + free * (free + 1) // 2
    if cap_tokens is not None:
        visited += (new_tokens - free) * cap_tokens
    return visited
