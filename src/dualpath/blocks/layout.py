"""Sizes and offsets of Full Blocks and Layer Blocks.

A *Full Block* holds the KV of ``block_tokens`` tokens for every layer, laid out as
``[layer, layer_block]``; a *Layer Block* is one layer's share of it. The bytes inside a Layer
Block are in the engine's own physical order (the ``layout_id`` says which), so concatenating
``num_layers`` Layer Blocks gives exactly the Full Block and nothing is ever converted.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 4096
"""Slots and file payloads start on this boundary, so that O_DIRECT works on both."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Geometry of the stored KV of one model on one engine.

    Attributes:
        num_layers: attention layers whose KV is stored.
        block_tokens: tokens in a stored block (64 in the paper).
        engine_block_tokens: tokens in one vLLM cache block; divides ``block_tokens``.
        token_layer_bytes: KV bytes of one token in one layer on one TP rank.

    Raises:
        ValueError: a size is not positive, or ``block_tokens`` is not a multiple of
            ``engine_block_tokens``.
    """

    num_layers: int
    block_tokens: int
    engine_block_tokens: int
    token_layer_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "block_tokens", "engine_block_tokens", "token_layer_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_tokens % self.engine_block_tokens:
            raise ValueError(
                f"block_tokens {self.block_tokens} must be a multiple of the engine's block size "
                f"{self.engine_block_tokens}"
            )

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one Layer Block."""
        return self.block_tokens * self.token_layer_bytes

    @property
    def full_block_bytes(self) -> int:
        """Bytes of one Full Block, without padding."""
        return self.num_layers * self.layer_block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes a Full Block takes in a buffer or file: padded to ``ALIGNMENT_BYTES``."""
        return -(-self.full_block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def engine_blocks_per_block(self) -> int:
        """vLLM blocks that make up one stored block."""
        return self.block_tokens // self.engine_block_tokens

    @property
    def engine_layer_block_bytes(self) -> int:
        """Bytes of one vLLM block in one layer."""
        return self.engine_block_tokens * self.token_layer_bytes

    def layer_offset_bytes(self, layer: int) -> int:
        """Offset of ``layer``'s Layer Block inside its Full Block.

        Raises:
            IndexError: no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside 0..{self.num_layers - 1}")
        return layer * self.layer_block_bytes

    def blocks_for_tokens(self, tokens: int) -> int:
        """Blocks needed to hold ``tokens`` tokens, the last one perhaps partial."""
        return -(-tokens // self.block_tokens)

    def full_blocks_in(self, tokens: int) -> int:
        """Complete blocks in the first ``tokens`` tokens."""
        return tokens // self.block_tokens

    def max_hit_blocks(self, prompt_tokens: int) -> int:
        """Most blocks a prompt may load: at least one token must always be computed."""
        return max(0, prompt_tokens - 1) // self.block_tokens
