"""Block I/O by preadv and pwritev in a pool of threads: works on every file system."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from errno import ETIMEDOUT
from typing import Final

from dualpath.storage.blockio import Direction, IoOp, run_op
from dualpath.storage.limiter import remaining_s

DEFAULT_THREADS: Final = 8


class ThreadPoolIO:
    """One system call per block, several blocks at a time. See ``BlockIO`` for the contract."""

    name = "threads"

    def __init__(self, threads: int = DEFAULT_THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dualpath-io")

    def transfer(self, direction: Direction, ops: Sequence[IoOp], deadline: float) -> list[int]:
        """See ``BlockIO.transfer``."""
        if len(ops) == 1:  # a hop to another thread would only add latency
            return [run_op(direction, ops[0])]
        futures = [self._pool.submit(run_op, direction, op) for op in ops]
        try:
            wait(futures, timeout=remaining_s(deadline, time.monotonic()))
        finally:
            # What no thread has taken up can be called back; what one has must be waited for.
            for future in futures:
                future.cancel()
            wait(futures)
        return [ETIMEDOUT if future.cancelled() else future.result() for future in futures]

    def close(self) -> None:
        """See ``BlockIO.close``."""
        self._pool.shutdown(wait=True)
