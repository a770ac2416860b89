"""How busy an engine is, as the worker sees it, for the reports of the traffic thread."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LiveFigures:
    """Requests in the last step, and the cache blocks that requests of ours hold.

    Written by vLLM's thread; the traffic thread only reads it, and a sum over a copied dict's
    values is as exact as a report can be.
    """

    block_tokens: int
    total_blocks: int
    running: int = 0
    held: dict[str, int] = field(default_factory=dict)

    def snapshot(self) -> dict[str, int]:
        """By the names of ``EngineStats``."""
        return {
            "running": self.running,
            "hbm_tokens_total": self.total_blocks * self.block_tokens,
            "hbm_tokens_used": sum(list(self.held.values())) * self.block_tokens,
        }
