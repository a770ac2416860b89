"""Writing blocks: whole in a private file first, then made visible in one step."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Final

from dualpath.blocks import BlockLayout
from dualpath.storage.blockio import BlockIO, Direction, IoOp
from dualpath.storage.counters import Counters
from dualpath.storage.header import HEADER_BYTES, BlockHeader, checksum, fingerprint
from dualpath.storage.limiter import Limiter
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.parts import Parts
from dualpath.storage.paths import BLOCKS_DIR, block_dir, block_path
from dualpath.storage.refusals import Gaps, Refusals
from dualpath.storage.relief import TRIES, Relief
from dualpath.storage.room import Changes, Room, Ticket, settle_deadline
from dualpath.storage.tempdir import TempArea
from dualpath.storage.types import NO_DISK, BlockId, WriteStatus, status_of

log = logging.getLogger(__name__)

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})


@dataclass(slots=True)
class _Draft:
    """A block on its way: its private file while that is open."""

    block: BlockId
    path: Path
    fd: int
    op: IoOp
    code: int = 0


@dataclass(slots=True)
class _Outcomes:
    """What became of the blocks of a batch, by index.

    Attributes:
        unplaced: blocks that the disk, or its quota, had no room for.
    """

    statuses: list[WriteStatus]
    unplaced: set[int] = field(default_factory=set)

    def refused(self, index: int, code: int) -> None:
        """The operating system said so."""
        self.statuses[index] = status_of(code)
        if code in NO_DISK:
            self.unplaced.add(index)


@dataclass(slots=True)
class BlockWriter:
    """Publishes blocks. Thread safe.

    Attributes:
        store: the store's directory.
        open_flags: added when a file is opened (O_DIRECT or 0).
        fsync: whether a block must be on stable storage before it becomes visible.
        temp: where private files go; None when the store cannot be written.
        closed_status: what becomes of every block while ``temp`` is None.
        room: asked before a private file is made.
        relief: makes room when the disk itself has none.
        gaps: blocks that got no room lately.
        pool: threads that wait for fsync; the file system joins concurrent ones.
        parts: where blocks are hashed while others of their batch are being written.
    """

    store: Path
    layout: BlockLayout
    io: BlockIO
    open_flags: int
    fsync: bool
    batch_blocks: int
    limiter: Limiter
    temp: TempArea | None
    counters: Counters
    pool: ThreadPoolExecutor
    room: Room
    relief: Relief
    gaps: Gaps
    parts: Parts
    refusals: Refusals
    closed_status: WriteStatus = WriteStatus.READ_ONLY
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _durable_dirs: set[Path] = field(default_factory=set)

    def write(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """See ``BlockStore.write``."""
        statuses: list[WriteStatus] = []
        file_bytes = HEADER_BYTES + self.layout.slot_bytes
        step = self.limiter.pace_blocks(file_bytes, self.batch_blocks)
        headers = aligned_buffers(min(step, len(blocks)), HEADER_BYTES) if blocks else []
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            if self.temp is None:
                statuses += [self.closed_status] * len(blocks[part])
            elif time.monotonic() >= deadline:
                statuses += [WriteStatus.EXPIRED] * len(blocks[part])
            else:
                statuses += self._write_reachable(
                    self.temp, root, blocks[part], slots[part], headers, deadline
                )
        self.counters.add_statuses(statuses)
        self.refusals.note(self.store, statuses)
        return statuses

    def _write_reachable(
        self,
        temp: TempArea,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        headers: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """Write those blocks that do not stand on one that got no room."""
        behind = self.gaps.behind(root, blocks)
        tried = [index for index in range(len(blocks)) if index not in behind]
        statuses = [WriteStatus.FULL] * len(blocks)
        outcomes = self._write_batch(
            temp, root, [blocks[i] for i in tried], [slots[i] for i in tried], headers, deadline
        )
        for index, status in zip(tried, outcomes, strict=True):
            statuses[index] = status
        self.gaps.note(root, blocks, statuses)
        return statuses

    def _write_batch(
        self,
        temp: TempArea,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        headers: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        file_bytes = HEADER_BYTES + self.layout.slot_bytes
        for block in blocks:
            self._clear_damaged(root, block)
        # The ticket outlives the private files: room is given back when they are gone.
        with self.room.admit(root, blocks, file_bytes, deadline) as ticket:
            done = _Outcomes([status or WriteStatus.EXPIRED for status in ticket.statuses])
            wanted = [i for i, status in enumerate(ticket.statuses) if status is None]
            self._try(temp, root, blocks, slots, headers, wanted, ticket, done, deadline)
            tries = 0
            while done.unplaced and tries < TRIES:
                tries += 1
                wanted = sorted(done.unplaced)
                # One more: names and folders take room too.
                if not self.relief.make_room((len(wanted) + 1) * file_bytes, deadline):
                    break
                done.unplaced.clear()
                self._try(temp, root, blocks, slots, headers, wanted, ticket, done, deadline)
            if tries == TRIES and done.unplaced:
                self.relief.in_vain()
            # Inside: a block that is said to be there must not be evicted before its name is safe.
            self._sync_dirs(root, blocks, done.statuses)
        return done.statuses

    def _try(
        self,
        temp: TempArea,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        headers: Sequence[memoryview],
        wanted: Sequence[int],
        ticket: Ticket,
        done: _Outcomes,
        deadline: float,
    ) -> None:
        """Write and publish the ``wanted`` ones of ``blocks``; their private files are gone when
        this returns."""
        file_bytes = HEADER_BYTES + self.layout.slot_bytes
        passed_s = self.limiter.reserve(len(wanted) * file_bytes, deadline) if wanted else None
        if passed_s is None:
            return
        with self._drafts(temp) as drafts:

            def work(span: slice) -> None:
                made = {}
                for i in wanted[span]:
                    draft = self._draft(temp, root, blocks[i], headers[i], slots[i])
                    if isinstance(draft, int):
                        done.refused(i, draft)
                    else:
                        drafts[i] = made[i] = draft
                if made:  # no file could even be made: the disk is full, or gone
                    self._fill(made, deadline)

            self.parts.run(work, len(wanted), file_bytes)
            self.limiter.wait_until(passed_s)
            self._publish_all(root, drafts, ticket, done, deadline)

    def _clear_damaged(self, root: bytes, block: BlockId) -> None:
        """A file of a wrong size can only be damaged; it would keep the good one out for ever."""
        path = block_path(self.store, root, block)
        if not self._is_damaged(path):
            return
        try:
            with self.room.changing(settle_deadline()) as changes:
                if self._is_damaged(path):
                    log.warning("block %s has a wrong length: replacing it", path)
                    changes.uncertain()
                    try:
                        path.unlink()
                    except OSError as error:
                        log.warning("block %s cannot be removed: %s", path, error.strerror)
        except OSError as error:
            log.warning("block %s cannot be removed: %s", path, error.strerror)

    def _is_damaged(self, path: Path) -> bool:
        try:
            return path.stat().st_size != HEADER_BYTES + self.layout.slot_bytes
        except OSError:
            return False  # absent, or whatever it is will show when we try to write

    @contextmanager
    def _drafts(self, temp: TempArea) -> Iterator[dict[int, _Draft]]:
        """Private files that are gone at the end, however it comes."""
        drafts: dict[int, _Draft] = {}
        try:
            yield drafts
        finally:
            for draft in drafts.values():
                os.close(draft.fd)
                try:
                    draft.path.unlink()
                except FileNotFoundError:
                    pass  # it was renamed into place, or the folder vanished
                except OSError as error:
                    log.warning("cannot remove %s: %s", draft.path, error.strerror)

    def _draft(
        self, temp: TempArea, root: bytes, block: BlockId, header: memoryview, slot: memoryview
    ) -> _Draft | int:
        """The private file, open; or why there is none (an errno)."""
        path = temp.new_path()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self.open_flags
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            log.debug("cannot create %s: %s", path, error.strerror)
            return error.errno or EIO
        header[:] = BlockHeader(
            root, block.key, block.parent, self.layout.full_block_bytes, self.layout.slot_bytes,
            checksum(slot), fingerprint(self.layout),
        ).encode()  # fmt: skip
        return _Draft(block, path, fd, IoOp(fd, header, slot))

    def _fill(self, drafts: dict[int, _Draft], deadline: float) -> None:
        """Write the private files and make them durable; faults go into ``code``."""
        pending = list(drafts.values())
        codes = self.io.transfer(Direction.WRITE, [draft.op for draft in pending], deadline)
        for draft, code in zip(pending, codes, strict=True):
            draft.code = code
            if code:
                log.debug("cannot write %s: %s", draft.path, os.strerror(code))
            else:
                self.counters.add("storage_write_bytes", draft.op.total_bytes)
        written = [draft for draft in pending if not draft.code]
        for draft, code in zip(written, self.pool.map(self._settle, written), strict=True):
            draft.code = code

    def _settle(self, draft: _Draft) -> int:
        try:
            # A short write that nobody reported would otherwise surface only at the next read.
            if os.fstat(draft.fd).st_size != draft.op.total_bytes:
                return EIO
            if self.fsync:
                os.fsync(draft.fd)
        except OSError as error:
            log.warning("cannot make %s durable: %s", draft.path, error.strerror)
            return error.errno or EIO
        return 0

    def _publish_all(
        self,
        root: bytes,
        drafts: dict[int, _Draft],
        ticket: Ticket,
        done: _Outcomes,
        deadline: float,
    ) -> None:
        for index, draft in drafts.items():
            if draft.code:
                done.refused(index, draft.code)
        whole = {i: draft for i, draft in drafts.items() if not draft.code}
        if not whole:
            return
        try:
            with self.room.changing(deadline) as changes:
                for index, draft in whole.items():
                    outcome = self._publish(root, draft, changes, ticket)
                    if isinstance(outcome, int):
                        done.refused(index, outcome)
                    else:
                        done.statuses[index] = outcome
        except OSError as error:
            log.warning("%s: %d blocks are not published: %s", self.store, len(whole), error)
            for index in whole:
                done.statuses[index] = status_of(error.errno or EIO)

    def _publish(
        self, root: bytes, draft: _Draft, changes: Changes, ticket: Ticket
    ) -> WriteStatus | int:
        """Give the finished file its name: the one step that makes it visible. An errno when it
        cannot be done."""
        path = block_path(self.store, root, draft.block)
        try:
            try:
                self._link(draft.path, path)
            except FileNotFoundError:
                self._make_dirs(root, draft.block)
                self._link(draft.path, path)
        except FileExistsError:
            return WriteStatus.PRESENT
        except OSError as error:
            log.debug("cannot publish %s: %s", path, error.strerror)
            return error.errno or EIO
        changes.published(root, draft.block, draft.op.total_bytes, ticket)
        return WriteStatus.PUBLISHED

    @staticmethod
    def _link(source: Path, target: Path) -> None:
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # No hard links here. Where nobody keeps account (and so a lock), renaming may replace
            # a block that another process published a moment ago, with one that means the same.
            if target.exists():
                raise FileExistsError(errno.EEXIST, "published already") from None
            source.rename(target)

    def _make_dirs(self, root: bytes, block: BlockId) -> None:
        # Not the blocks folder itself: if that is gone the store is, and writing on would fill
        # whatever lies under a mount point that came off.
        leaf = block_dir(self.store, root, block.key)
        for path in (leaf.parent, leaf):
            path.mkdir(exist_ok=True)

    def _sync_dirs(
        self, root: bytes, blocks: Sequence[BlockId], statuses: list[WriteStatus]
    ) -> None:
        """Make the new names durable; a block whose name is not counts as failed."""
        if not self.fsync:
            return
        by_dir: dict[Path, list[int]] = {}
        for index, status in enumerate(statuses):
            # PRESENT too: whoever published it may not have got as far as this.
            if status in (WriteStatus.PUBLISHED, WriteStatus.PRESENT):
                by_dir.setdefault(block_dir(self.store, root, blocks[index].key), []).append(index)
        results = self.pool.map(self._sync_dir, by_dir)
        for indexes, code in zip(by_dir.values(), results, strict=True):
            if code:
                for index in indexes:
                    statuses[index] = status_of(code)

    def _sync_dir(self, leaf: Path) -> int:
        try:
            sync_dir(leaf)
            with self._lock:
                known = leaf in self._durable_dirs
            if not known:
                # Whoever made these folders may have died before it synced their parents.
                sync_dir(leaf.parent)
                sync_dir(self.store / BLOCKS_DIR)
                with self._lock:
                    self._durable_dirs.add(leaf)
        except OSError as error:
            log.warning("cannot make %s durable: %s", leaf, error.strerror)
            return error.errno or EIO
        return 0


def sync_dir(path: Path) -> None:
    """fsync a directory, so that names made in it survive a power failure.

    Raises:
        OSError: it cannot be opened or synced.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
