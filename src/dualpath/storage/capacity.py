"""A limit on the bytes in a store, held by all processes that share it.

At every moment published files and private files together have at most ``capacity_bytes``: room is
reserved before a private file is made, and a published file keeps the room it had. Names appear
and vanish only under the ledger's lock, so that the ledger and the directory agree whenever nobody
holds it; a holder that died is found out and the directory is counted.

Each process keeps its own index of what could go (a ``Forest``), made by one listing when it first
needs one and brought up to date from the ledger's log after that.

Without a limit the account is kept for the order of names and for pins, so that blocks may go when
the disk itself is full; nobody counts bytes then until somebody has to know them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dualpath.storage.books import (
    CAPACITY_DIR,
    HOLD_FILE,
    HOLD_STEP_BYTES,
    Entry,
    HoldFile,
    LedgerFile,
    Totals,
    read_hold,
    take_lock,
)
from dualpath.storage.counters import Counters
from dualpath.storage.forest import UNKNOWN_USE_S, Forest, Name, StoredFile, count_bytes
from dualpath.storage.limiter import remaining_s
from dualpath.storage.paths import TMP_DIR, block_path
from dualpath.storage.room import Changes, Ticket, settle_deadline, statuses_now
from dualpath.storage.tempdir import TempArea, remove_abandoned
from dualpath.storage.types import NO_DISK, BlockId, StoreError, WriteStatus, status_of

log = logging.getLogger(__name__)

UNLIMITED_BYTES: Final = 1 << 62
_OPEN_DEADLINE_S: Final = 60.0
_REAP_INTERVAL_S: Final = 1.0
_EVICT_AT_ONCE: Final = 256
"""Blocks removed in one turn of the lock by ``shrink``, so that writers get between."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What ``shrink`` did.

    Attributes:
        removed: ``(root, block, bytes)`` in the order of removal.
        left_bytes: published bytes that remain.
    """

    removed: list[tuple[bytes, BlockId, int]]
    left_bytes: int


class Ledger:
    """A ``Room`` with a limit, or at least an account. Thread safe."""

    evicts = True

    def __init__(
        self,
        store: Path,
        capacity_bytes: int,
        temp: TempArea | None,
        counters: Counters,
    ) -> None:
        """Use ``open`` or ``visit``."""
        self._counts = capacity_bytes > 0 or temp is None
        self.capacity_bytes = capacity_bytes
        self._limit_bytes = capacity_bytes or UNLIMITED_BYTES
        self._store = store
        self._tmp = store / TMP_DIR
        self._own = temp.path if temp is not None else None
        self._counters = counters
        self._mutex = threading.Lock()
        self._reserved_bytes = 0
        self._pins: Counter[Name] = Counter()
        self._evicted: dict[bytes, list[bytes]] = {}
        self._forest: Forest | None = None
        self._forest_at = (0, 0)
        self._reaped_s = float("-inf")
        folder = store / CAPACITY_DIR
        self._file = LedgerFile(store)
        try:
            self._members = os.open(
                folder / "members", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
            self._hold = HoldFile(temp.path) if temp is not None else None
        except OSError:
            self._file.close()
            raise

    @classmethod
    def exists(cls, store: Path) -> bool:
        """Whether somebody keeps account of this store."""
        return (store / CAPACITY_DIR / "ledger").exists()

    @classmethod
    def open(cls, store: Path, capacity_bytes: int, temp: TempArea, counters: Counters) -> Ledger:
        """Take part as a writer. Whoever is alone counts the store; what is there above
        ``capacity_bytes`` is evicted.

        Args:
            capacity_bytes: 0 to keep account without a limit.
            temp: the writer's folder; it must outlive this object.

        Raises:
            StoreError: no file locks here, or the books cannot be used.
        """
        try:
            ledger = cls(store, capacity_bytes, temp, counters)
            try:
                ledger._join(time.monotonic() + _OPEN_DEADLINE_S)
            except BaseException:  # an interrupt too: the handle is ours until we return
                ledger.close()
                raise
        except OSError as error:
            raise StoreError(
                f"storage.capacity: the limit on {store} cannot be kept: {error.strerror}"
            ) from error
        return ledger

    @classmethod
    def visit(cls, store: Path) -> Ledger:
        """Take part without writing: to remove blocks beside running engines.

        Raises:
            OSError: the books cannot be used.
        """
        return cls(store, 0, None, Counters())

    # ---- Room ------------------------------------------------------------------------------------

    @contextmanager
    def admit(
        self, root: bytes, blocks: Sequence[BlockId], file_bytes: int, deadline: float
    ) -> Iterator[Ticket]:
        """See ``Room``."""
        # Its own blocks too: room for the last must not be made by removing the first.
        pins = Counter({(root, key) for block in blocks for key in (block.key, block.parent)})
        try:
            try:
                ticket = self._admit(root, blocks, file_bytes, pins, deadline)
            except OSError as error:
                # A full disk may have no room for what we hold either.
                wanted_bytes = file_bytes + HOLD_STEP_BYTES
                if error.errno not in NO_DISK or not self.make_room(wanted_bytes, deadline, pins):
                    raise
                ticket = self._admit(root, blocks, file_bytes, pins, deadline)
        except OSError as error:
            log.debug("no leave to write in %s: %s", self._store, error)
            yield Ticket([status_of(error.errno or errno.EIO)] * len(blocks))
            return
        try:
            yield ticket
        finally:
            self._give_back(ticket.left_bytes, pins)

    @contextmanager
    def changing(self, deadline: float) -> Iterator[Changes]:
        """See ``Room``."""
        with self._locked(deadline) as totals:
            changes = Changes()
            self._begin(totals)
            try:
                yield changes
            finally:
                self._reserved_bytes -= changes.converted_bytes
            # Only now: after an error that nobody foresaw the ledger stays dirty, and the next
            # holder counts.
            self._commit(totals, changes)

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``Room``."""
        with self._locked(deadline):
            self._pins[root, key] += 1
            try:
                self._save_hold()
            except OSError:
                self._pins -= Counter([(root, key)])
                raise

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``Room``."""
        self._give_back(0, Counter([(root, key)]))

    def make_room(self, wanted_bytes: int, deadline: float, spared: Collection[Name] = ()) -> int:
        """See ``Room``. Nothing goes while a writer lives that keeps no account, for it has pinned
        nothing and publishes without asking.

        Args:
            spared: blocks that stay beside those that are pinned.
        """
        with self._indexed(deadline) as (totals, forest):
            remove_abandoned(self._tmp)
            if stranger := self._stranger():
                log.warning(
                    "store %s: the disk is full, and nothing can be evicted while the writer of %s "
                    "keeps no account: give all engines the same storage.capacity",
                    self._store, stranger,
                )  # fmt: skip
                return 0
            gone = self._evict(totals, forest, wanted_bytes, self._pinned() | set(spared))
        freed = sum(size_bytes for _root, _block, size_bytes in gone)
        self._counters.add("storage_disk_full_bytes", freed)
        return freed

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``Room``."""
        with self._mutex:
            evicted, self._evicted = self._evicted, {}
        return evicted

    def close(self) -> None:
        """See ``Room``."""
        if self._hold is not None:
            self._hold.close()
        os.close(self._members)
        self._file.close()

    # ---- for maintenance -------------------------------------------------------------------------

    def usage(self, deadline: float) -> Totals:
        """The present totals; reservations of dead writers may still be in them. Where nobody
        keeps to a limit they may be not ``counted``.

        Raises:
            OSError: as ``Room.changing``.
        """
        with self._locked(deadline) as totals:
            return replace(totals)

    def shrink(self, target_bytes: int, latest_s: float, deadline: float) -> Shrunk:
        """Evict until at most ``target_bytes`` are published, sparing what is pinned and what was
        used after ``latest_s`` (seconds since 1970).

        Raises:
            OSError: as ``Room.changing``.
        """
        removed: list[tuple[bytes, BlockId, int]] = []
        while True:
            with self._indexed(deadline) as (totals, forest):
                excess = totals.published_bytes - target_bytes
                pinned = self._pinned()
                gone = self._evict(totals, forest, excess, pinned, latest_s, _EVICT_AT_ONCE)
                removed += gone
                if len(gone) < _EVICT_AT_ONCE:
                    return Shrunk(removed, totals.published_bytes)

    # ---- inside ----------------------------------------------------------------------------------

    def _join(self, deadline: float) -> None:
        try:
            fcntl.flock(self._members, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        if alone and self._counts:
            # Only now can nobody else be relied upon: the machine may have lost its power.
            with self._locked(deadline, trust=False):
                pass
        take_lock(self._members, fcntl.LOCK_SH, deadline)
        with self._locked(deadline) as totals:
            excess = self._excess(totals, 0)
        if excess > 0:
            with self._indexed(deadline) as (totals, forest):
                self._evict(totals, forest, self._excess(totals, 0), self._pinned())

    def _admit(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        file_bytes: int,
        pins: Counter[Name],
        deadline: float,
    ) -> Ticket:
        with self._locked(deadline) as totals:
            ticket = self._reserve(root, blocks, file_bytes, pins, totals, None)
        if ticket is None:
            with self._indexed(deadline) as (totals, forest):
                ticket = self._reserve(root, blocks, file_bytes, pins, totals, forest)
        assert ticket is not None
        return ticket

    def _reserve(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        file_bytes: int,
        pins: Counter[Name],
        totals: Totals,
        forest: Forest | None,
    ) -> Ticket | None:
        """A ticket; None when room must be made and there is no ``forest`` to make it from."""
        statuses = statuses_now(self._store, root, blocks, file_bytes)
        wanted = statuses.count(None) * file_bytes
        excess = self._excess(totals, wanted)
        if excess > 0:
            if forest is None:
                return None
            self._evict(totals, forest, excess, self._pinned() | set(pins))
            excess = self._excess(totals, wanted)
        over = max(0, -(-excess // file_bytes))
        # The last ones go without: a block is of no use without those before it.
        for index in range(len(blocks) - 1, -1, -1):
            if over and statuses[index] is None:
                statuses[index] = WriteStatus.FULL
                over -= 1
        granted = statuses.count(None) * file_bytes
        self._pins += pins
        self._reserved_bytes += granted
        try:
            self._save_hold()
        except OSError:
            self._pins -= pins
            self._reserved_bytes -= granted
            raise
        totals.reserved_bytes += granted
        self._file.save(totals)
        return Ticket(statuses, granted)

    def _excess(self, totals: Totals, wanted_bytes: int) -> int:
        """Bytes too many if ``wanted_bytes`` came on top, without what dead writers held."""
        excess = totals.published_bytes + totals.reserved_bytes + wanted_bytes - self._limit_bytes
        now = time.monotonic()
        if excess <= 0 or now - self._reaped_s < _REAP_INTERVAL_S:
            return excess
        self._reaped_s = now
        before = totals.reserved_bytes
        totals.reserved_bytes = self._sum_of_holds()
        self._file.save(totals)
        return excess - before + totals.reserved_bytes

    def _give_back(self, left_bytes: int, pins: Counter[Name]) -> None:
        try:
            with self._locked(settle_deadline()) as totals:
                self._pins -= pins
                self._reserved_bytes -= left_bytes
                self._save_hold()
                if left_bytes:
                    totals.reserved_bytes -= left_bytes
                    self._file.save(totals)
        except OSError as error:
            # Too much stays reserved, which is safe, until this writer ends or does more.
            log.warning("%s: room not given back yet: %s", self._store, error)

    def _evict(
        self,
        totals: Totals,
        forest: Forest,
        excess_bytes: int,
        pinned: Collection[Name],
        latest_s: float = float("inf"),
        most: int | None = None,
    ) -> list[tuple[bytes, BlockId, int]]:
        """Remove files until ``excess_bytes`` are freed or nothing more may go."""
        changes = Changes()
        removed: list[tuple[bytes, BlockId, int]] = []
        spared: list[StoredFile] = []
        freed = 0
        while freed < excess_bytes and (most is None or len(removed) < most):
            file = forest.pop_leaf()
            if file is None:
                break
            if file.name in pinned:
                spared.append(file)
                continue
            if not self._as_we_know_it(forest, file, changes):
                continue
            if file.used_s > latest_s:
                spared.append(file)
                continue
            if not changes.entries and not totals.dirty:
                self._begin(totals)
            try:
                block_path(self._store, file.root, file.block).unlink()
            except OSError as error:
                log.debug("cannot evict %s: %s", file.block.key.hex(), error)
                self._counters.add("storage_evict_failed")
                spared.append(file)
                continue
            forest.discard(*file.name)
            changes.removed(file.root, file.block, file.size_bytes)
            removed.append((file.root, file.block, file.size_bytes))
            self._evicted.setdefault(file.root, []).append(file.block.key)
            freed += file.size_bytes
        for file in spared:
            forest.offer(file)
        if changes.entries or changes.count_anew or totals.dirty:
            self._commit(totals, changes)
        self._counters.add("storage_evicted_blocks", len(removed))
        self._counters.add("storage_evicted_bytes", freed)
        return removed

    def _as_we_know_it(self, forest: Forest, file: StoredFile, changes: Changes) -> bool:
        """Look at a candidate. One that was used since we last looked goes back in the order."""
        try:
            info = block_path(self._store, file.root, file.block).stat()
        except OSError:
            # Removed by somebody who keeps no account, or the folder vanished.
            forest.discard(*file.name)
            changes.uncertain()
            return False
        if (info.st_size, info.st_mtime) == (file.size_bytes, file.used_s):
            return True
        if info.st_size != file.size_bytes:
            changes.uncertain()
        forest.add(StoredFile(file.root, file.block, info.st_size, info.st_mtime))
        return False

    def _begin(self, totals: Totals) -> None:
        totals.dirty = True
        self._file.save(totals)

    def _commit(self, totals: Totals, changes: Changes) -> None:
        """Enter what was changed; the ledger is clean after this."""
        for entry in changes.entries if totals.counted else ():
            totals.published_bytes += entry.size_bytes if entry.added else -entry.size_bytes
        totals.reserved_bytes -= changes.converted_bytes
        if changes.converted_bytes:
            self._save_hold()
        current = self._forest is not None and self._catch_up(totals)
        if self._file.append(totals, changes.entries):
            if current:
                self._catch_up(totals)
        elif current:
            self._apply(changes.entries)
            self._forest_at = (totals.generation, totals.log_bytes)
        # Left dirty when the sizes are in doubt: the next one counts.
        totals.dirty = changes.count_anew
        self._file.save(totals)

    def _save_hold(self) -> None:
        if self._hold is not None:
            self._hold.save(self._reserved_bytes, self._pins)

    def _pinned(self) -> set[Name]:
        pinned = set(self._pins)
        for _reserved, pins in self._holds():
            pinned.update(pins)
        return pinned

    def _sum_of_holds(self) -> int:
        """What living writers have reserved; the private files of dead ones go first."""
        remove_abandoned(self._tmp)
        return self._reserved_bytes + sum(reserved for reserved, _pins in self._holds())

    def _stranger(self) -> Path | None:
        """The folder of a writer that keeps no account."""
        folders = (path for path in self._tmp.iterdir() if path.is_dir())
        return next((path for path in folders if not (path / HOLD_FILE).exists()), None)

    def _holds(self) -> Iterator[tuple[int, list[Name]]]:
        """What the other writers hold."""
        for folder in list(self._tmp.iterdir()):
            hold = None if folder == self._own else read_hold(folder)
            if hold is not None:
                yield hold

    # ---- the index -------------------------------------------------------------------------------

    @contextmanager
    def _indexed(self, deadline: float) -> Iterator[tuple[Totals, Forest]]:
        """The lock together with an index that is up to date."""
        forest: Forest | None = None
        at = (0, 0)
        for attempt in range(3):
            with self._locked(deadline) as totals:
                if forest is not None and totals.generation == at[0]:
                    self._forest, self._forest_at = forest, at
                if self._forest is not None:
                    self._catch_up(totals)
                if self._forest is None and attempt == 2:
                    # The log is begun afresh faster than we can list: list undisturbed.
                    self._forest = Forest.scan(self._store)
                    self._forest_at = (totals.generation, totals.log_bytes)
                if self._forest is not None:
                    if not totals.counted or self._own is None:  # a visitor has just listed
                        totals.published_bytes = self._forest.total_bytes
                        totals.counted = True
                        self._file.save(totals)
                    yield totals, self._forest
                    return
                at = (totals.generation, totals.log_bytes)
            # Listed without the lock, since it may take seconds; the log tells what changed.
            forest = Forest.scan(self._store)
        raise AssertionError("unreachable")

    def _catch_up(self, totals: Totals) -> bool:
        """Bring the index up to date; False, and no index, when it is too far behind."""
        generation, offset = self._forest_at
        if generation != totals.generation:
            self._forest = None
            return False
        if offset < totals.log_bytes:
            self._apply(list(self._file.entries(offset, totals.log_bytes)))
            self._forest_at = (generation, totals.log_bytes)
        return True

    def _apply(self, entries: Collection[Entry]) -> None:
        assert self._forest is not None
        for entry in entries:
            if entry.added:
                self._forest.add(
                    StoredFile(entry.root, entry.block, entry.size_bytes, UNKNOWN_USE_S)
                )
            else:
                self._forest.discard(entry.root, entry.block.key)

    @contextmanager
    def _locked(self, deadline: float, *, trust: bool = True) -> Iterator[Totals]:
        """The books, ours alone. They are right: where not, the directory has been counted, unless
        we need no number."""
        if not self._mutex.acquire(timeout=remaining_s(deadline, time.monotonic())):
            raise TimeoutError(errno.ETIMEDOUT, "another thread holds the books")
        try:
            self._file.lock(deadline)
            try:
                totals = self._file.load()
                wrong = totals is None or totals.dirty or not trust
                if totals is None or wrong or (self.capacity_bytes and not totals.counted):
                    totals = self._begin_anew(totals)
                yield totals
            finally:
                self._file.unlock()
        finally:
            self._mutex.release()

    def _begin_anew(self, before: Totals | None) -> Totals:
        """Totals from the directory itself, and an empty log."""
        start_s = time.monotonic()
        reserved = self._sum_of_holds()
        published = count_bytes(self._store) if self._counts else 0
        # A generation that nobody has an index of: the old ledger's number may be lost.
        generation = max(before.generation + 1 if before else 0, time.time_ns())
        totals = Totals(generation, 0, published, reserved, counted=self._counts)
        self._file.begin_log(totals)
        self._file.save(totals)
        if self._counts:
            log.info(
                "counted %s: %d bytes, in %.2f s",
                self._store, published, time.monotonic() - start_s,
            )  # fmt: skip
        return totals
