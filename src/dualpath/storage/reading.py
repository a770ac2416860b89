"""Reading blocks: open, pace, transfer, verify, and remove what is not what it claims to be."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import ENODATA, ETIMEDOUT
from pathlib import Path
from typing import Final

from dualpath.storage.blockio import BlockIO, Direction, IoOp
from dualpath.storage.counters import Counters
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.limiter import Limiter
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.parts import Parts
from dualpath.storage.paths import block_path
from dualpath.storage.room import Room, settle_deadline
from dualpath.storage.tempdir import TempArea
from dualpath.storage.types import BlockId, ReadStatus
from dualpath.storage.verify import slot_fault

log = logging.getLogger(__name__)

TOUCH_AFTER_S: Final = 60.0
"""A block's time of use is noted at most this often, to spare the file system's journal."""
_ZEROS: Final = bytes(HEADER_BYTES)


@dataclass(slots=True)
class BlockReader:
    """Reads verified blocks. Thread safe.

    Attributes:
        store: the store's directory.
        payload_bytes, slot_bytes: bytes of KV in a block, and of its slot.
        open_flags: added when a file is opened (O_DIRECT or 0).
        temp: where a corrupt file is moved before it is judged again; None: cannot be removed.
        room: told of what is removed.
        parts: where blocks are verified while others of their batch are still being read.
    """

    store: Path
    payload_bytes: int
    slot_bytes: int
    io: BlockIO
    open_flags: int
    batch_blocks: int
    limiter: Limiter
    temp: TempArea | None
    counters: Counters
    room: Room
    parts: Parts

    def read(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        """See ``BlockStore.read``."""
        statuses: list[ReadStatus] = []
        step = self.limiter.pace_blocks(HEADER_BYTES + self.slot_bytes, self.batch_blocks)
        headers = aligned_buffers(min(step, len(blocks)), HEADER_BYTES) if blocks else []
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            if time.monotonic() >= deadline:
                statuses += [ReadStatus.EXPIRED] * len(blocks[part])
                continue
            statuses += self._read_batch(root, blocks[part], slots[part], headers, deadline)
        self.counters.add_statuses(statuses)
        return statuses

    def _read_batch(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        headers: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        fds: dict[int, int] = {}
        statuses = [ReadStatus.FAILED] * len(blocks)
        try:
            for index, block in enumerate(blocks):
                opened = self._open(root, block)
                if isinstance(opened, ReadStatus):
                    statuses[index] = opened
                else:
                    fds[index] = opened
            if not fds:
                return statuses
            nbytes = len(fds) * (HEADER_BYTES + self.slot_bytes)
            passed_s = self.limiter.reserve(nbytes, deadline)
            if passed_s is None:
                for index in fds:
                    statuses[index] = ReadStatus.EXPIRED
                return statuses
            ops = [IoOp(fd, headers[index], slots[index]) for index, fd in fds.items()]
            for op in ops:
                op.header[:] = _ZEROS  # what a previous batch left must not pass for this one's
            opened_files = list(fds.items())

            def work(span: slice) -> None:
                codes = self.io.transfer(Direction.READ, ops[span], deadline)
                for (index, fd), op, code in zip(opened_files[span], ops[span], codes, strict=True):
                    statuses[index] = self._judge(root, blocks[index], fd, op, code)

            self.parts.run(work, len(ops), HEADER_BYTES + self.slot_bytes)
            # The bytes are the caller's only when they have passed the NIC.
            self.limiter.wait_until(passed_s)
        finally:
            for fd in fds.values():
                os.close(fd)
        return statuses

    def _open(self, root: bytes, block: BlockId) -> int | ReadStatus:
        path = block_path(self.store, root, block)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self.open_flags
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            return ReadStatus.MISSING
        except OSError as error:
            log.warning("cannot open %s: %s", path, error.strerror)
            return ReadStatus.FAILED
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                status = ReadStatus.FAILED
            elif info.st_size != HEADER_BYTES + self.slot_bytes:
                status = self._discard(root, block, path, fd, f"it has {info.st_size} bytes")
            else:
                self._touch(fd, info.st_mtime)
                return fd
        except OSError as error:
            log.warning("cannot look at %s: %s", path, error.strerror)
            status = ReadStatus.FAILED
        os.close(fd)
        return status

    def _touch(self, fd: int, mtime_s: float) -> None:
        if time.time() - mtime_s < TOUCH_AFTER_S:
            return
        try:
            os.utime(fd)
        except OSError:
            # Another user's file or a read-only mount: only the order of eviction suffers.
            self.counters.add("storage_touch_failed")

    def _judge(self, root: bytes, block: BlockId, fd: int, op: IoOp, code: int) -> ReadStatus:
        path = block_path(self.store, root, block)
        if code == ETIMEDOUT:
            return ReadStatus.EXPIRED
        if code == ENODATA:
            return self._discard(root, block, path, fd, "it ended early")
        if code:
            log.warning("cannot read %s: %s", path, os.strerror(code))
            return ReadStatus.FAILED
        self.counters.add("storage_read_bytes", op.total_bytes)
        fault = slot_fault(root, block, op.header, op.slot, self.payload_bytes)
        return self._discard(root, block, path, fd, fault) if fault else ReadStatus.OK

    def _discard(self, root: bytes, block: BlockId, path: Path, fd: int, reason: str) -> ReadStatus:
        """Remove the bad file, unless somebody has put a good one in its place since."""
        log.warning("corrupt block %s: %s", path, reason)
        try:
            removed = self._remove_same(root, block, path, fd)
        except OSError as error:
            log.warning("corrupt block %s cannot be removed: %s", path, error.strerror)
            removed = False
        self.counters.add("storage_corrupt_removed" if removed else "storage_corrupt_kept")
        return ReadStatus.CORRUPT

    def _remove_same(self, root: bytes, block: BlockId, path: Path, fd: int) -> bool:
        if self.temp is None:
            return False
        aside = self.temp.new_path()
        with self.room.changing(settle_deadline()) as changes:
            # Moved first and looked at then: between a look and an unlink it could be replaced.
            try:
                path.rename(aside)
            except FileNotFoundError:
                return True
            ours, moved = os.fstat(fd), aside.stat()
            if (ours.st_dev, ours.st_ino) != (moved.st_dev, moved.st_ino):
                aside.rename(path)
                return True
            aside.unlink()
            changes.removed(root, block, moved.st_size)
            if moved.st_size != HEADER_BYTES + self.slot_bytes:
                changes.uncertain()
            return True
