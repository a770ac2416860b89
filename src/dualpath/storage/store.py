"""The persistent KV store: a directory of Full Blocks shared by all engines of a cluster."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Final

from dualpath.blocks import BlockLayout
from dualpath.storage.blockio import BlockIO
from dualpath.storage.capacity import Ledger
from dualpath.storage.counters import Counters
from dualpath.storage.filesystem import is_of_one_machine
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.limiter import Limiter
from dualpath.storage.memory import check_call
from dualpath.storage.parts import Parts
from dualpath.storage.paths import BLOCKS_DIR, TMP_DIR, block_path, scan_blocks
from dualpath.storage.probe import choose_direct, choose_io, open_usrbio
from dualpath.storage.reading import BlockReader
from dualpath.storage.refusals import Gaps, Refusals, stored_in
from dualpath.storage.relief import Relief
from dualpath.storage.room import Room, Unlimited, settle_deadline
from dualpath.storage.tempdir import TempArea, foreign_writers
from dualpath.storage.types import (
    NO_DISK,
    BlockId,
    ReadStatus,
    StoreClosedError,
    StoreError,
    WriteStatus,
    status_of,
)
from dualpath.storage.writing import BlockWriter

log = logging.getLogger(__name__)

_SYNC_THREADS: Final = 8
_OPEN_ROOM_BYTES: Final = 256 << 10
"""More than a writer's folder and what it holds need, also where a name takes a block."""


class BlockStore:
    """An open store.

    Any number of threads may call, in any number of processes that share the directory; calls
    block. Outcomes of single blocks come back as statuses; exceptions mean that the call itself
    was wrong. Slots belong to the store while a call lasts and are the caller's again, for good,
    when it returns: nothing writes into them afterwards, whatever the statuses say. That is also
    the one wait a deadline cannot cut short: I/O that the kernel has started is waited for.

    Attributes:
        io_name: ``nixl``, ``threads`` or ``usrbio``: what was chosen.
        direct: whether the page cache is bypassed.
        writable: False when the directory could only be opened for reading.
        capacity_bytes: most bytes in the store; 0 for no limit.
        evicts: whether blocks may go to make room: with a capacity, and when the disk is full.
    """

    def __init__(
        self,
        path: Path,
        layout: BlockLayout,
        io: BlockIO,
        temp: TempArea | None,
        reader: BlockReader,
        writer: BlockWriter,
        counters: Counters,
        pool: ThreadPoolExecutor,
        parts: Parts,
        room: Room,
    ) -> None:
        """Use ``open``."""
        self.path = path
        self.layout = layout
        self.io_name = io.name
        self.direct = io.name == "usrbio" or bool(reader.open_flags & os.O_DIRECT)
        self.writable = temp is not None
        self.capacity_bytes = room.capacity_bytes
        self.evicts = room.evicts
        self._io = io
        self._temp = temp
        self._reader = reader
        self._writer = writer
        self._counters = counters
        self._pool = pool
        self._parts = parts
        self._room = room
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        layout: BlockLayout,
        *,
        io: str = "auto",
        direct: str = "auto",
        fsync: bool = True,
        batch_blocks: int = 32,
        read_limiter: Limiter | None = None,
        write_limiter: Limiter | None = None,
        capacity_bytes: int = 0,
        usrbio_library: str = "",
    ) -> BlockStore:
        """Open the store at ``path``, making it when missing, and remove what dead writers left.

        Args:
            path: a directory on any POSIX file system that all engines reach.
            layout: geometry of the blocks; a file of another geometry counts as corrupt.
            io: ``nixl``, ``threads``, ``usrbio`` or ``auto``; direct: ``on``, ``off`` or ``auto``.
            fsync: wait for stable storage before a block becomes visible.
            batch_blocks: most blocks in one submission.
            read_limiter, write_limiter: the node's storage NIC; unlimited when None.
            capacity_bytes: most bytes in published and private files together, the same for all
                processes that share the store; 0 for no limit. What is too much is evicted here.
                Without a limit blocks go when the disk is full, if it is this machine's own.
            usrbio_library: 3FS's client library, for ``usrbio``.

        Raises:
            UnsupportedIoError: ``io`` or ``direct`` demands what does not work here.
            StoreError: the directory cannot be used, or an argument is wrong.
        """
        if batch_blocks < 1:
            raise StoreError(f"batch_blocks must be at least 1, got {batch_blocks}")
        file_bytes = HEADER_BYTES + layout.slot_bytes
        if 0 < capacity_bytes < file_bytes:
            raise StoreError(
                f"storage.capacity: {capacity_bytes} bytes hold no block of {file_bytes} bytes"
            )
        store = Path(path).absolute()
        on_3fs = io == "usrbio"
        if on_3fs and direct != "auto":
            raise StoreError(f"direct = {direct!r} means nothing with io = 'usrbio'; leave it out")
        temp, closed_status = _prepare(store, locks_are_local=on_3fs)
        counters = Counters()
        with ExitStack() as undo:
            if temp is not None:
                undo.callback(temp.close)
            if on_3fs and capacity_bytes:
                _refuse_other_hosts(store)
            room = undo.enter_context(closing(_room(store, capacity_bytes, temp, counters, on_3fs)))
            use_direct = not on_3fs and choose_direct(direct, temp)
            method: BlockIO = (
                open_usrbio(usrbio_library, store, temp, batch_blocks, file_bytes)
                if on_3fs
                else choose_io(io, temp, use_direct, batch_blocks)
            )
            undo.pop_all()  # from here on they belong to the store
        flags = os.O_DIRECT if use_direct else 0
        pool = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="dualpath-sync")
        parts = Parts()
        reader = BlockReader(
            store, layout.full_block_bytes, layout.slot_bytes, method, flags, batch_blocks,
            read_limiter or Limiter.unlimited(), temp, counters, room, parts,
        )  # fmt: skip
        writer = BlockWriter(
            store, layout, method, flags, fsync, batch_blocks,
            write_limiter or Limiter.unlimited(), temp, counters, pool, room, Relief(store, room),
            Gaps(stored_in(store)), parts, Refusals(evicts=room.evicts), closed_status,
        )  # fmt: skip
        log.info(
            "store %s: io %s, O_DIRECT %s, fsync %s, %s, capacity %s", store, method.name,
            "on" if use_direct else "off", "on" if fsync else "off",
            "writable" if temp else "read-only", capacity_bytes or "unlimited",
        )  # fmt: skip
        return cls(store, layout, method, temp, reader, writer, counters, pool, parts, room)

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        """Read ``blocks[i]`` into ``slots[i]`` and verify it.

        A block that fails verification is removed and counted. A slot's content is meaningful
        only where the status is ``OK``.

        Args:
            root: namespace digest.
            slots: writable, page-aligned views of exactly ``layout.slot_bytes``.
            deadline: ``time.monotonic()`` after which no further batch is started.

        Returns:
            One status per block.

        Raises:
            StoreClosedError: the store is closed.
            StoreError: the limiter's state file cannot be used any more.
            ValueError: a name or slot is unusable, or the counts differ.
        """
        return self._reader.read(root, blocks, self._checked(root, blocks, slots), deadline)

    def write(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """Store ``slots[i]`` as ``blocks[i]``, whole or not at all.

        Publishing what is stored already is a success (``PRESENT``) and moves no bytes. The
        slots must not change while the call lasts. A private file never outlives the call. Where
        the store ``evicts``, room is made by taking away the least recently used blocks without
        children; ``take_evicted`` names them.

        Args, Raises: as ``read``.

        Returns:
            One status per block.
        """
        return self._writer.write(root, blocks, self._checked(root, blocks, slots), deadline)

    def scan(self, root: bytes | None = None) -> Iterator[tuple[bytes, BlockId]]:
        """``(root, block)`` of every published block; see ``paths.scan_blocks``."""
        self._check_open()
        return scan_blocks(self.path, root)

    def remove(self, root: bytes, block: BlockId) -> bool:
        """Take a block away; a reader that has it open finishes undisturbed.

        Returns:
            Whether it was there.

        Raises:
            OSError: it is there and cannot be removed.
        """
        self._check_open()
        path = block_path(self.path, root, block)
        with self._room.changing(settle_deadline()) as changes:
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                return False
            path.unlink()
            changes.removed(root, block, size)
        return True

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """Keep a block from eviction, by any process, until ``unpin`` or the end of this process.

        A parent never goes before its children, so this keeps the whole chain up to the block. It
        need not be there. Pins count. Where nothing is evicted this does nothing.

        Raises:
            OSError: the capacity's books cannot be used before ``deadline``; nothing is pinned.
        """
        self._check_open()
        self._room.pin(root, key, deadline)

    def unpin(self, root: bytes, key: bytes) -> None:
        """Undo one ``pin``."""
        self._check_open()
        self._room.unpin(root, key)

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """Keys, by root, of what this object has evicted since the last call."""
        return self._room.take_evicted()

    def counters(self) -> dict[str, int]:
        """Monotonic totals of this open store; ``Counters`` lists the names."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Release threads, handles and the private folder. No call may be under way."""
        if self._closed:
            return
        self._closed = True
        self._parts.close()
        self._io.close()
        self._pool.shutdown(wait=True)
        self._room.close()
        if self._temp is not None:
            self._temp.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"store {self.path} is closed")

    def _checked(
        self, root: bytes, blocks: Sequence[BlockId], slots: Sequence[memoryview]
    ) -> list[memoryview]:
        self._check_open()
        return check_call(root, blocks, slots, self.layout.slot_bytes)


def _prepare(store: Path, *, locks_are_local: bool) -> tuple[TempArea | None, WriteStatus]:
    """Make the store's folders; the private one, or None and the reason when blocks can only be
    read."""
    try:
        (store / BLOCKS_DIR).mkdir(parents=True, exist_ok=True)
        try:
            temp = TempArea.create(store / TMP_DIR, locks_are_local=locks_are_local)
        except OSError as error:
            if error.errno not in NO_DISK or not _make_room_to_open(store):
                raise
            temp = TempArea.create(store / TMP_DIR, locks_are_local=locks_are_local)
        return temp, WriteStatus.FAILED
    except OSError as error:
        status = status_of(error.errno or errno.EIO)
        refused = status in (WriteStatus.READ_ONLY, WriteStatus.FULL)
        if refused and (store / BLOCKS_DIR).is_dir():
            todo = "free the disk" if status is WriteStatus.FULL else "see mount and permissions"
            log.warning(
                "store %s can only be read until it is opened again: %s; %s and restart the engine",
                store, error.strerror, todo,
            )  # fmt: skip
            return None, status
        raise StoreError(f"storage.path: {store} cannot be used: {error.strerror}") from error


def _refuse_other_hosts(store: Path) -> None:
    """3FS's file locks do not reach other hosts, so hosts cannot keep an account together."""
    foreign = foreign_writers(store / TMP_DIR)
    if foreign:
        raise StoreError(
            "storage.capacity: file locks on 3FS do not reach other hosts, and one uses this "
            f"store ({foreign[0]}); leave capacity out, or remove that folder if the host is gone"
        )


def _make_room_to_open(store: Path) -> bool:
    """Let some blocks go so that a writer can begin on a full disk; whether any did."""
    if not Ledger.exists(store):
        return False  # nobody has pinned what is in use
    try:
        with closing(Ledger.visit(store)) as ledger:
            freed = ledger.make_room(_OPEN_ROOM_BYTES, settle_deadline())
    except OSError as error:
        log.warning("store %s: the disk is full, and nothing is evicted: %s", store, error)
        return False
    if freed:
        log.warning("store %s: the disk is full; %d bytes of blocks went", store, freed)
    return freed > 0


def _room(
    store: Path, capacity_bytes: int, temp: TempArea | None, counters: Counters, on_3fs: bool
) -> Room:
    if temp is None:
        return Unlimited(store)  # nothing is written, and nothing can be removed
    if capacity_bytes or Ledger.exists(store):
        return Ledger.open(store, capacity_bytes, temp, counters)
    # A lock a batch, for all engines one after the other, is nothing on a disk of this machine and
    # much on a file system that many share: there an account is kept only when it is asked for.
    if on_3fs or not is_of_one_machine(store):
        return Unlimited(store)
    try:
        return Ledger.open(store, 0, temp, counters)
    except StoreError as error:
        log.warning("blocks will not be evicted when the disk is full: %s", error)
        return Unlimited(store)
