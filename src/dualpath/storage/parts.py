"""Parts of a batch that overlap: while the device works on one, the CPU hashes another.

Hashing a block takes a sixth of the time its bytes need from a fast disk. Done for a whole batch
before or after its I/O, the device would stand idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

MOST_PARTS: Final = 4
PART_BYTES: Final = 4 << 20
"""Smaller parts would cost more submissions than the overlap gains."""


class Parts:
    """Runs the parts of batches in threads of its own. Thread safe.

    Args:
        callers: calls that are expected at once; further ones wait for a thread.
    """

    def __init__(self, callers: int = 2) -> None:
        # The caller's own thread does one part.
        self._pool = ThreadPoolExecutor(
            callers * (MOST_PARTS - 1), thread_name_prefix="dualpath-part"
        )

    def run(self, work: Callable[[slice], None], count: int, block_bytes: int) -> None:
        """Call ``work`` with slices that cover ``range(count)``, several at once, and return when
        all are over, whatever happened.

        Args:
            count: blocks of ``block_bytes`` each.

        Raises:
            Exception: what a call of ``work`` raised; the first one's, where several did.
        """
        first, *others = spans(count, block_bytes)
        futures = [self._pool.submit(work, span) for span in others]
        try:
            work(first)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads. No call may be under way."""
        self._pool.shutdown(wait=True)


def spans(count: int, block_bytes: int) -> list[slice]:
    """Contiguous parts of at least ``PART_BYTES``, ``MOST_PARTS`` at most, as equal as can be."""
    parts = max(1, min(MOST_PARTS, count, count * block_bytes // PART_BYTES))
    edges = [count * number // parts for number in range(parts + 1)]
    return [slice(edges[number], edges[number + 1]) for number in range(parts)]
