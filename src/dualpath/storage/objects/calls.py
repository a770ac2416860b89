"""Requests side by side, with one deadline for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from dualpath.storage.limiter import remaining_s

T = TypeVar("T")


def gather(
    pool: ThreadPoolExecutor, calls: Sequence[Callable[[], T]], deadline: float, *, finish: bool
) -> list[T | OSError | None]:
    """What became of each call: its result, the error it raised, or None when it was not done by
    ``deadline`` (``time.monotonic()``).

    Args:
        finish: wait for what has been started, however long it takes; else it goes on by itself
            and its result is lost.
    """
    futures = [pool.submit(call) for call in calls]
    try:
        wait(futures, timeout=remaining_s(deadline, time.monotonic()))
    finally:
        for future in futures:
            future.cancel()
        if finish:
            wait(futures)
    outcomes: list[T | OSError | None] = []
    for future in futures:
        if future.cancelled() or not future.done():
            outcomes.append(None)
            continue
        error = future.exception()
        if error is None:
            outcomes.append(future.result())
        elif isinstance(error, OSError):
            outcomes.append(error)
        else:
            raise error
    return outcomes
