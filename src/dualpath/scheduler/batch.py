"""The compute-quota batch of a PE: as many prompt tokens, in FIFO order, as the quota has time for.

Data-parallel attention makes all GPUs of a group wait for the slowest, so batches are cut by their
predicted attention time rather than by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class AttentionCost(Protocol):
    """Predicts attention time. Pure; called O(requests + log tokens) times a batch.

    ``request_s`` must not fall when ``bsz`` rises; ``AttentionTimeModel`` is one.
    """

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that do not depend on its requests."""
        ...

    def request_s(self, cached: int, bsz: int) -> float:
        """Seconds that a request of ``bsz`` tokens behind ``cached`` ones adds to a step."""
        ...


def cut_batch(
    pending: Sequence[tuple[int, int]],
    quota_s: float,
    cost: AttentionCost,
    max_tokens: int | None = None,
) -> list[int]:
    """Tokens to compute in the next step, per request.

    Whole requests are taken in FIFO order while the predicted time is within the quota; the one
    that would cross it is cut to the most tokens that fit (binary search), and the batch ends
    there. If not even one token fits, the first request gets one: a step always makes progress.

    Args:
        pending: ``(cached, bsz)`` in FIFO order; ``bsz`` > 0 tokens are still to be computed.
        quota_s: most seconds of attention in a step.
        cost: the fitted model.
        max_tokens: most tokens in a step, whatever the time; None for no such limit.

    Returns:
        As many counts as there are requests, each between 0 and its ``bsz``; after a count below
        ``bsz`` all are 0.

    Raises:
        ValueError: a ``bsz`` or ``max_tokens`` is below 1, or ``cached`` is negative.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    counts = [0] * len(pending)
    time_s = cost.fixed_s
    room = sum(bsz for _, bsz in pending) if max_tokens is None else max_tokens
    for index, (cached, bsz) in enumerate(pending):
        if bsz < 1 or cached < 0:
            raise ValueError(f"request {index}: cached {cached} and bsz {bsz} are out of range")
        count = _most_tokens(cached, min(bsz, room), quota_s - time_s, cost)
        if count == 0 and index == 0:
            count = 1
        counts[index] = count
        if count < bsz:
            break
        room -= count
        time_s += cost.request_s(cached, count)
    return counts


def share_of_long(left_tokens: Sequence[int], budget_tokens: int) -> int:
    """Most tokens of one prompt in the next step, so that a long one does not hold up short ones.

    A prompt is long when the step could be filled with it alone. While short ones wait beside
    ``k`` long ones, each long one gets one part of ``k + 1``, and the short ones the last part.
    Not in the paper, whose batches are first in, first out.

    Args:
        left_tokens: prompt tokens still to be computed, per request.
        budget_tokens: tokens of the step, at least 1.

    Returns:
        0 for no limit: there are only long prompts, or only short ones.
    """
    long = sum(left >= budget_tokens for left in left_tokens)
    if long in (0, len(left_tokens)):
        return 0
    return max(1, budget_tokens // (long + 1))


def _most_tokens(cached: int, bsz: int, left_s: float, cost: AttentionCost) -> int:
    """Largest count up to ``bsz`` whose time is at most ``left_s``."""
    if bsz == 0 or cost.request_s(cached, bsz) <= left_s:
        return bsz
    fits, crosses = 0, bsz
    while crosses - fits > 1:
        middle = (fits + crosses) // 2
        if cost.request_s(cached, middle) <= left_s:
            fits = middle
        else:
            crosses = middle
    return fits
