"""Figures that vLLM's scheduler knows and the traffic thread reports.

The two halves of the connector live in one process (an engine drives one GPU, so vLLM runs its
worker inside the engine core). They share this object and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LiveFigures:
    """Written by vLLM's thread, read by the traffic thread; plain ints, never torn."""

    running: int = 0
    block_tokens: int = 0
    total_blocks: int = 0
    free_blocks: Callable[[], int] = field(default=lambda: 0)

    def snapshot(self) -> dict[str, int]:
        """By the names of ``EngineStats``."""
        return {
            "running": self.running,
            "hbm_tokens_total": self.total_blocks * self.block_tokens,
            "hbm_tokens_used": (self.total_blocks - self.free_blocks()) * self.block_tokens,
        }


LIVE = LiveFigures()
