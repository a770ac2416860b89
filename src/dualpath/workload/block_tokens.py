"""Tokens of prompts that share blocks: equal block ids at equal places give equal tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dualpath.workload.blocks import block_tokens, prompt_blocks
from dualpath.workload.trace import Trajectory


class BlockTokens:
    """Draws a trajectory's appends so that they repeat what the trace says is shared.

    A token at some place of a prompt is that place of its block's own random tokens, a function of
    the key and the block's id alone. Answers stay what the server generates: the blocks they are
    in are not shared with others, whatever their ids.

    Raises:
        TraceError: the trajectory's blocks make no sense.
    """

    def __init__(self, trajectory: Trajectory, key: str, ids: Sequence[int]) -> None:
        """
        Args:
            trajectory: has ``blocks``.
            key: agents with the same key share.
            ids: token ids to draw from.
        """
        self._size = block_tokens(trajectory)
        self._prompts = list(prompt_blocks(trajectory))
        self._key = key
        self._ids = ids

    def draw(self, index: int, start: int, count: int) -> list[int]:
        """Tokens ``start .. start + count`` of the prompt of round ``index``; fewer where the
        trace's blocks end before."""
        blocks = self._prompts[index]
        found: list[int] = []
        at, end = start, min(start + count, len(blocks) * self._size)
        while at < end:
            place = at % self._size
            whole = random.Random(f"{self._key}/block/{blocks[at // self._size]}").choices(
                self._ids, k=self._size
            )
            part = whole[place : place + end - at]
            found += part
            at += len(part)
        return found
