"""Writing blocks to a bucket: one request each, on the condition that nobody was faster."""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dualpath.blocks import BlockLayout
from dualpath.storage.counters import Counters
from dualpath.storage.header import HEADER_BYTES, BlockHeader, checksum, fingerprint
from dualpath.storage.limiter import Limiter
from dualpath.storage.objects.account import BlockAccount, ObjectTicket
from dualpath.storage.objects.bucket import Bucket, Found, ObjectError
from dualpath.storage.objects.calls import gather
from dualpath.storage.objects.names import block_folder, block_object
from dualpath.storage.refusals import Gaps, Refusals
from dualpath.storage.types import BlockId, WriteStatus, status_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ObjectWriter:
    """Publishes blocks. Thread safe.

    Attributes:
        most: blocks at once, one request each.
        exclusive: whether the server takes a write on the condition that there is no such object.
        closed_status: what becomes of every block when the bucket cannot be written; else None.
        account: asked before anything is sent.
        gaps: blocks that got no room lately.
    """

    bucket: Bucket
    layout: BlockLayout
    most: int
    limiter: Limiter
    exclusive: bool
    closed_status: WriteStatus | None
    counters: Counters
    account: BlockAccount
    pool: ThreadPoolExecutor
    gaps: Gaps
    refusals: Refusals

    def write(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """See ``Store.write``."""
        statuses: list[WriteStatus] = []
        step = self.limiter.pace_blocks(self._object_bytes, self.most)
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            if self.closed_status is not None:
                statuses += [self.closed_status] * len(blocks[part])
            elif time.monotonic() >= deadline:
                statuses += [WriteStatus.EXPIRED] * len(blocks[part])
            else:
                statuses += self._write_reachable(root, blocks[part], slots[part], deadline)
        self.counters.add_statuses(statuses)
        self.refusals.note(self.bucket.where, statuses)
        return statuses

    @property
    def _object_bytes(self) -> int:
        return HEADER_BYTES + self.layout.slot_bytes

    def _write_reachable(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """Write those blocks that do not stand on one that got no room."""
        behind = self.gaps.behind(root, blocks)
        tried = [index for index in range(len(blocks)) if index not in behind]
        statuses = [WriteStatus.FULL] * len(blocks)
        outcomes = self._write_batch(
            root, [blocks[i] for i in tried], [slots[i] for i in tried], deadline
        )
        for index, status in zip(tried, outcomes, strict=True):
            statuses[index] = status
        self.gaps.note(root, blocks, statuses)
        return statuses

    def _write_batch(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        if not blocks:
            return []
        now = self._statuses_now(root, blocks, deadline)
        if not {None, WriteStatus.PRESENT} & set(now):
            return [status or WriteStatus.EXPIRED for status in now]  # no answer: ask no further
        with self.account.admit(root, blocks, now, self._object_bytes, deadline) as ticket:
            statuses = [status or WriteStatus.EXPIRED for status in ticket.statuses]
            wanted = [i for i, status in enumerate(ticket.statuses) if status is None]
            if not wanted:
                return statuses
            passed_s = self.limiter.reserve(len(wanted) * self._object_bytes, deadline)
            if passed_s is None:
                return statuses
            calls = [functools.partial(self._send, root, blocks[i], slots[i]) for i in wanted]
            answers = gather(self.pool, calls, deadline, finish=True)
            for index, answer in zip(wanted, answers, strict=True):
                statuses[index] = self._outcome(root, blocks[index], answer, ticket)
            self.limiter.wait_until(passed_s)
        return statuses

    def _statuses_now(
        self, root: bytes, blocks: Sequence[BlockId], deadline: float
    ) -> list[WriteStatus | None]:
        """``PRESENT`` for what is stored with the right length, None for what may be written."""
        names = [block_object(root, block) for block in blocks]
        calls = [functools.partial(self.bucket.head, name) for name in names]
        statuses: list[WriteStatus | None] = [WriteStatus.EXPIRED] * len(blocks)
        # An absent object gives None, as one that was not asked about in time: hence the pair.
        looks = gather(self.pool, [functools.partial(_pair, c) for c in calls], deadline,
                       finish=False)  # fmt: skip
        for index, look in enumerate(looks):
            if isinstance(look, OSError):
                log.debug("cannot look at %s: %s", names[index], look.strerror)
                statuses[index] = status_of(look.errno or errno.EIO)
            elif look is not None:
                statuses[index] = self._status_of_found(root, blocks[index], look[0])
        return statuses

    def _status_of_found(
        self, root: bytes, block: BlockId, found: Found | None
    ) -> WriteStatus | None:
        if found is None:
            return None
        if found.size_bytes == self._object_bytes:
            return WriteStatus.PRESENT
        # One of a wrong size can only be damaged; it would keep the good one out for ever.
        log.warning("block %s has a wrong length: replacing it", found.name)
        try:
            self.bucket.delete(found.name)
        except ObjectError as error:
            log.warning("block %s cannot be removed: %s", found.name, error.strerror)
            return status_of(error.errno or errno.EIO)
        self.account.gone(root, block)
        return None

    def _send(self, root: bytes, block: BlockId, slot: memoryview) -> bool:
        header = BlockHeader(
            root, block.key, block.parent, self.layout.full_block_bytes, self.layout.slot_bytes,
            checksum(slot), fingerprint(self.layout),
        ).encode()  # fmt: skip
        self.bucket.put(
            block_object(root, block), [memoryview(header), slot], absent=self.exclusive
        )
        return True

    def _outcome(
        self, root: bytes, block: BlockId, answer: bool | OSError | None, ticket: ObjectTicket
    ) -> WriteStatus:
        if answer is None:
            return WriteStatus.EXPIRED  # never sent
        if isinstance(answer, OSError):
            uncertain = isinstance(answer, ObjectError) and answer.uncertain
            if uncertain:
                ticket.published(root, block, self._object_bytes, sure=False)
            if answer.errno == errno.EEXIST:
                # After a lost answer it is probably our own; either way it means the same.
                return WriteStatus.PUBLISHED if uncertain else WriteStatus.PRESENT
            log.debug("cannot write %s: %s", block.key.hex(), answer.strerror)
            return status_of(answer.errno or errno.EIO)
        ticket.published(root, block, self._object_bytes)
        self.counters.add("storage_write_bytes", self._object_bytes)
        return WriteStatus.PUBLISHED


def _pair(call: functools.partial[Found | None]) -> tuple[Found | None]:
    return (call(),)


def stored_in(bucket: Bucket) -> functools.partial[bool]:
    """For ``Gaps``: looks into a bucket."""
    return functools.partial(_is_stored, bucket)


def _is_stored(bucket: Bucket, root: bytes, key: bytes) -> bool:
    folder = block_folder(root, key)
    try:
        found = next(bucket.list(folder, after=f"{folder}/{key.hex()}"), None)
    except ObjectError:
        return False
    return found is not None and found.name.startswith(f"{folder}/{key.hex()}.")
