"""Reading blocks from a bucket: fetch, pace, copy, verify, and remove what is corrupt."""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dualpath.storage.counters import Counters
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.limiter import Limiter
from dualpath.storage.objects.account import BlockAccount
from dualpath.storage.objects.bucket import Bucket, Download, Found
from dualpath.storage.objects.calls import gather
from dualpath.storage.objects.names import block_object
from dualpath.storage.types import BlockId, ReadStatus
from dualpath.storage.verify import slot_fault

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ObjectReader:
    """Reads verified blocks. Thread safe.

    Attributes:
        payload_bytes, slot_bytes: bytes of KV in a block, and of its slot.
        most: blocks at once, one request each.
        removes: whether a corrupt block may be removed.
        account: told of what is used and removed.
    """

    bucket: Bucket
    payload_bytes: int
    slot_bytes: int
    most: int
    limiter: Limiter
    removes: bool
    counters: Counters
    account: BlockAccount
    pool: ThreadPoolExecutor

    def read(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        """See ``Store.read``."""
        statuses: list[ReadStatus] = []
        step = self.limiter.pace_blocks(HEADER_BYTES + self.slot_bytes, self.most)
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            if time.monotonic() >= deadline:
                statuses += [ReadStatus.EXPIRED] * len(blocks[part])
                continue
            statuses += self._read_batch(root, blocks[part], slots[part], deadline)
        good = [b for b, status in zip(blocks, statuses, strict=True) if status is ReadStatus.OK]
        self.account.used(root, good)
        self.counters.add_statuses(statuses)
        return statuses

    def _read_batch(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        statuses = [ReadStatus.EXPIRED] * len(blocks)
        begun = self._begin(root, blocks, statuses, deadline)
        if not begun:
            return statuses
        passed_s = self.limiter.reserve(len(begun) * (HEADER_BYTES + self.slot_bytes), deadline)
        if passed_s is None:
            return statuses
        bodies = gather(
            self.pool, [download.body for download in begun.values()], deadline, finish=False
        )
        for (index, download), body in zip(begun.items(), bodies, strict=True):
            if isinstance(body, OSError):
                log.warning("cannot read %s: %s", download.found.name, body.strerror)
                statuses[index] = ReadStatus.FAILED
            elif body is not None:
                statuses[index] = self._accept(
                    root, blocks[index], download.found, body, slots[index]
                )
        # The bytes are the caller's only when they have passed the NIC.
        self.limiter.wait_until(passed_s)
        return statuses

    def _begin(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        statuses: list[ReadStatus],
        deadline: float,
    ) -> dict[int, Download]:
        """Ask for all blocks; those that are there with the right length, by index."""
        names = [block_object(root, block) for block in blocks]
        calls = [functools.partial(self.bucket.get, name) for name in names]
        begun: dict[int, Download] = {}
        for index, answer in enumerate(gather(self.pool, calls, deadline, finish=False)):
            if isinstance(answer, Download):
                if answer.found.size_bytes == HEADER_BYTES + self.slot_bytes:
                    begun[index] = answer
                else:
                    reason = f"it has {answer.found.size_bytes} bytes"
                    statuses[index] = self._discard(root, blocks[index], answer.found, reason)
            elif answer is not None and answer.errno == errno.ENOENT:
                statuses[index] = ReadStatus.MISSING
            elif answer is not None:
                log.warning("cannot read %s: %s", names[index], answer.strerror)
                statuses[index] = ReadStatus.FAILED
        return begun

    def _accept(
        self, root: bytes, block: BlockId, found: Found, body: memoryview, slot: memoryview
    ) -> ReadStatus:
        self.counters.add("storage_read_bytes", body.nbytes)
        if body.nbytes != HEADER_BYTES + self.slot_bytes:
            return self._discard(root, block, found, f"it ended after {body.nbytes} bytes")
        slot[:] = body[HEADER_BYTES:]
        fault = slot_fault(root, block, body[:HEADER_BYTES], slot, self.payload_bytes)
        return self._discard(root, block, found, fault) if fault else ReadStatus.OK

    def _discard(self, root: bytes, block: BlockId, found: Found, reason: str) -> ReadStatus:
        """Remove the bad object, unless somebody has put a good one in its place since."""
        log.warning("corrupt block %s: %s", found.name, reason)
        removed = False
        if self.removes:
            try:
                now = self.bucket.head(found.name)
                if now is not None and now.etag == found.etag:
                    self.bucket.delete(found.name)
                    self.account.gone(root, block)
                removed = True
            except OSError as error:
                log.warning("corrupt block %s cannot be removed: %s", found.name, error.strerror)
        self.counters.add("storage_corrupt_removed" if removed else "storage_corrupt_kept")
        return ReadStatus.CORRUPT
