"""More agents from the same trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from dualpath.workload.trace import Round, Trajectory

SYNTHETIC_ROUND_TOKENS: Final = 64
"""Prompt of the round put before a copy: one Full Block of random tokens."""
SYNTHETIC_ROUND_GEN: Final = 1


def multiply(source: Callable[[], Iterable[Trajectory]], times: int) -> Iterator[Trajectory]:
    """The trajectories, then ``times - 1`` copies of each behind a synthetic round of its own.

    The synthetic round's tokens are random and 1 token is generated (the paper's way): since a
    block is known by all tokens before it, no copy hits what another left. Copies are
    named ``ID*NUMBER``. They keep no block ids: theirs would be others' ids.

    Args:
        source: gives the trajectories anew each time it is called, so that none are kept.
        times: at least 1.

    Raises:
        ValueError: ``times`` is below 1.
    """
    if times < 1:
        raise ValueError(f"times: must be at least 1, got {times}")
    yield from source()
    for number in range(1, times):
        for trajectory in source():
            yield copy_of(trajectory, number)


def copy_of(trajectory: Trajectory, number: int) -> Trajectory:
    """Copy ``number`` of a trajectory."""
    extra = {
        key: value
        for key, value in trajectory.extra.items()
        if key not in ("blocks", "block", "shared_prefix")
    }
    return replace(
        trajectory,
        id=f"{trajectory.id}*{number}",
        rounds=(Round(SYNTHETIC_ROUND_TOKENS, SYNTHETIC_ROUND_GEN, 0.0), *trajectory.rounds),
        extra=extra,
    )
