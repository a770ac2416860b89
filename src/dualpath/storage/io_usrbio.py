"""Block I/O by 3FS's USRBIO: rings in memory shared with its daemon, no system call a block.

A *lane* is a ring and memory of its own for a batch; it reads or it writes, and one thread at a
time uses it, since preparing I/O is not thread safe. Slots that lie in memory shared with the
daemon (``Usrbio.memory``) are read and written in place; others go through the lane's memory.

A batch that is not over at its deadline is given up when it uses the lane's memory only: the lane
is set aside with it and used again once all of it has come back, so nothing late can hit a slot.
I/O on the slots themselves is waited for, as with every other method.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from dualpath.storage.blockio import Direction, IoOp
from dualpath.storage.limiter import remaining_s
from dualpath.storage.types import UnsupportedIoError
from dualpath.storage.usrbio import Usrbio
from dualpath.storage.usrbio_lane import Lane

log = logging.getLogger(__name__)

DEFAULT_LANES: Final = 4
"""Of each direction."""
_MOST_STUCK: Final = 8
"""Lanes set aside, of each direction, before the daemon is taken for dead."""
_CLOSE_S: Final = 5.0


class UsrbioIO:
    """Batches through USRBIO. See ``BlockIO`` for the contract.

    Args:
        mount: the 3FS mount point.
        batch_blocks: most operations in one call.
        block_bytes: header and slot.
        lanes: batches in flight at once, of each direction; further callers wait.

    Raises:
        UnsupportedIoError: no ring or memory can be had.
    """

    name = "usrbio"

    def __init__(
        self,
        library: Usrbio,
        mount: str,
        batch_blocks: int,
        block_bytes: int,
        lanes: int = DEFAULT_LANES,
    ) -> None:
        self._library = library
        self._mount = mount
        self._batch_blocks = batch_blocks
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._free: dict[Direction, queue.LifoQueue[Lane | None]] = {}
        self._stuck: dict[Direction, list[Lane]] = {}
        for direction in Direction:
            self._free[direction] = queue.LifoQueue()
            self._stuck[direction] = []
        for direction in Direction:
            for _ in range(lanes - 1):
                self._free[direction].put(None)  # below the made one: made when first needed
            try:
                self._free[direction].put(self._new_lane(direction))
            except OSError as error:
                self.close()
                raise UnsupportedIoError(f"io = 'usrbio': {error.strerror}") from error

    @property
    def stuck_lanes(self) -> int:
        """Lanes whose I/O was given up and has not come back yet."""
        with self._lock:
            return sum(map(len, self._stuck.values()))

    def transfer(self, direction: Direction, ops: Sequence[IoOp], deadline: float) -> list[int]:
        """See ``BlockIO.transfer``."""
        codes: list[int] = []
        for start in range(0, len(ops), self._batch_blocks):
            codes += self._batch(direction, ops[start : start + self._batch_blocks], deadline)
        return codes

    def _batch(self, direction: Direction, ops: Sequence[IoOp], deadline: float) -> list[int]:
        try:
            lane = self._free[direction].get(timeout=remaining_s(deadline, time.monotonic()))
        except queue.Empty:
            return [errno.ETIMEDOUT] * len(ops)
        try:
            lane = lane or self._returned(direction) or self._new_lane(direction)
            if direction is Direction.WRITE:
                for op in ops:
                    # The kernel learns nothing of what USRBIO writes; so the length comes first.
                    os.ftruncate(op.fd, op.total_bytes)
            return lane.transfer(ops, deadline)
        except OSError as error:
            log.warning("USRBIO %s of %d blocks failed: %s", direction.value, len(ops), error)
            return [error.errno or errno.EIO] * len(ops)
        finally:
            self._put_back(direction, lane)

    def _put_back(self, direction: Direction, lane: Lane | None) -> None:
        if lane is not None and not lane.idle:
            with self._lock:
                self._stuck[direction].append(lane)
            lane = None
        self._free[direction].put(lane)

    def _returned(self, direction: Direction) -> Lane | None:
        """A lane that was set aside and whose I/O has come back since.

        Raises:
            OSError: too many have not.
        """
        with self._lock:
            stuck = self._stuck[direction]
            for lane in stuck:
                if lane.idle:
                    stuck.remove(lane)
                    return lane
            if len(stuck) >= _MOST_STUCK:
                raise OSError(errno.EIO, f"{len(stuck)} batches have not come back from 3FS")
        return None

    def _new_lane(self, direction: Direction) -> Lane:
        return Lane(self._library, self._mount, direction, self._batch_blocks, self._block_bytes)

    def close(self) -> None:
        """See ``BlockIO.close``. What does not come back within seconds stays for ever: its memory
        may still be written."""
        lanes = [lane for free in self._free.values() for lane in _drain(free) if lane is not None]
        lanes += [lane for stuck in self._stuck.values() for lane in stuck]
        until = time.monotonic() + _CLOSE_S
        for lane in lanes:
            while not lane.idle and time.monotonic() < until:
                time.sleep(0.001)
            if lane.idle:
                lane.close()
            else:
                log.warning("3FS still works on a batch: its memory is not given back")


def _drain(free: queue.LifoQueue[Lane | None]) -> list[Lane | None]:
    lanes: list[Lane | None] = []
    while True:
        try:
            lanes.append(free.get_nowait())
        except queue.Empty:
            return lanes
