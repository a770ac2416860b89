"""What moves bytes between slots and open files."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EIO, ENODATA
from typing import Protocol

from dualpath.blocks import ALIGNMENT_BYTES


class Direction(enum.Enum):
    """Which way a batch goes."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class IoOp:
    """One block file: its header and its slot, one after the other from offset 0.

    Attributes:
        fd: open file.
        header, slot: page-aligned, writable views.
    """

    fd: int
    header: memoryview
    slot: memoryview

    @property
    def total_bytes(self) -> int:
        """Bytes this operation moves."""
        return self.header.nbytes + self.slot.nbytes


class BlockIO(Protocol):
    """Moves whole batches of blocks.

    Any number of threads may call. A call returns when nothing of its batch is under way any
    more, whatever happened: the memory is the caller's again and will not be touched. The kernel
    offers no way to call back a read it has started, so a device that hangs keeps the call.
    """

    name: str

    def transfer(self, direction: Direction, ops: Sequence[IoOp], deadline: float) -> list[int]:
        """Read or write every operation's bytes, in any order.

        Args:
            deadline: ``time.monotonic()`` after which nothing new is started.

        Returns:
            One errno per operation: 0 when all bytes moved, ``ENODATA`` when the file ended
            early, ``ETIMEDOUT`` when it was not started in time. Never raises for an operation
            that failed.
        """

    def close(self) -> None:
        """Release threads and handles. No call may be under way or follow."""


def run_op(direction: Direction, op: IoOp) -> int:
    """Do one operation with preadv or pwritev; returns its errno as ``BlockIO`` does."""
    call = os.preadv if direction is Direction.READ else os.pwritev
    pending = [op.header, op.slot]
    offset = 0
    while pending:
        try:
            moved = call(op.fd, pending, offset)
        except OSError as error:
            return error.errno or EIO
        if moved == 0:
            return ENODATA if direction is Direction.READ else EIO
        offset += moved
        pending = _after(pending, moved)
        if pending and offset % ALIGNMENT_BYTES:
            # O_DIRECT cannot go on from the middle of a sector. A read that stops there has met
            # the end of the file.
            return ENODATA if direction is Direction.READ else EIO
    return 0


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    left: list[memoryview] = []
    for view in views:
        if count >= view.nbytes:
            count -= view.nbytes
        else:
            left.append(view[count:])
            count = 0
    return left
