"""The account that all processes which share a store keep of it: published and reserved bytes in
one ledger under one lock, what each writer has reserved and pinned, and who is there.

Names appear and vanish only under the lock, so that the ledger and the directory agree whenever
nobody holds it; a holder that died is found out and the directory is counted.

Each process keeps its own index of what could go (a ``Forest``), made by one listing when it first
needs one and brought up to date from the ledger's log after that.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpath.storage.books import (
    CAPACITY_DIR,
    HOLD_FILE,
    Entry,
    HoldFile,
    LedgerFile,
    Totals,
    read_hold,
    take_lock,
)
from dualpath.storage.forest import UNKNOWN_USE_S, Forest, Name, StoredFile, count_bytes
from dualpath.storage.limiter import remaining_s
from dualpath.storage.paths import TMP_DIR
from dualpath.storage.room import Changes
from dualpath.storage.tempdir import TempArea, remove_abandoned

log = logging.getLogger(__name__)


class Account:
    """One process's part in the account of a store. ``locked`` and ``indexed`` are thread safe; all
    else but ``close`` is called inside one of them.

    Args:
        limited: whether published bytes must always be known, because they have a limit.
        counts: whether this process counts the directory when the ledger is wrong.
        temp: the writer's folder, which must outlive this; None for one who only removes.

    Raises:
        OSError: the books cannot be used.
    """

    def __init__(self, store: Path, temp: TempArea | None, *, limited: bool, counts: bool) -> None:
        self._limited, self._counts = limited, counts
        self._store = store
        self._tmp = store / TMP_DIR
        self._own = temp.path if temp is not None else None
        self._mutex = threading.Lock()
        self._reserved_bytes = 0
        self._pins: Counter[Name] = Counter()
        self._forest: Forest | None = None
        self._forest_at = (0, 0)
        self._file = LedgerFile(store)
        try:
            self._members = os.open(
                store / CAPACITY_DIR / "members", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
            self._hold = HoldFile(temp.path) if temp is not None else None
        except OSError:
            self._file.close()
            raise

    @staticmethod
    def exists(store: Path) -> bool:
        """Whether somebody keeps account of this store."""
        return (store / CAPACITY_DIR / "ledger").exists()

    def join(self, deadline: float) -> None:
        """Be one of those who keep account. Whoever is alone counts the store.

        Raises:
            OSError: no file locks here, or the books cannot be used.
        """
        try:
            fcntl.flock(self._members, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        if alone and self._counts:
            # Only now can nobody else be relied upon: the machine may have lost its power.
            with self.locked(deadline, trust=False):
                pass
        take_lock(self._members, fcntl.LOCK_SH, deadline)

    def close(self) -> None:
        """Let go. No call may be under way or follow."""
        if self._hold is not None:
            self._hold.close()
        os.close(self._members)
        self._file.close()

    @property
    def guard(self) -> threading.Lock:
        """What ``locked`` holds against other threads of this process."""
        return self._mutex

    # ---- the lock --------------------------------------------------------------------------------

    @contextmanager
    def locked(self, deadline: float, *, trust: bool = True) -> Iterator[Totals]:
        """The books, ours alone. They are right: where not, the directory has been counted, unless
        we need no number.

        Raises:
            TimeoutError: others hold them for longer than ``deadline``.
            OSError: they cannot be used.
        """
        if not self._mutex.acquire(timeout=remaining_s(deadline, time.monotonic())):
            raise TimeoutError(errno.ETIMEDOUT, "another thread holds the books")
        try:
            self._file.lock(deadline)
            try:
                totals = self._file.load()
                wrong = totals is None or totals.dirty or not trust
                if totals is None or wrong or (self._limited and not totals.counted):
                    totals = self._begin_anew(totals)
                yield totals
            finally:
                self._file.unlock()
        finally:
            self._mutex.release()

    @contextmanager
    def indexed(self, deadline: float) -> Iterator[tuple[Totals, Forest]]:
        """The lock together with an index that is up to date.

        Raises:
            OSError: as ``locked``.
        """
        forest: Forest | None = None
        at = (0, 0)
        for attempt in range(3):
            with self.locked(deadline) as totals:
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

    # ---- what is there ---------------------------------------------------------------------------

    def begin(self, totals: Totals) -> None:
        """Names are about to change. Until ``commit`` whoever finds the ledger counts anew."""
        totals.dirty = True
        self._file.save(totals)

    def commit(self, totals: Totals, changes: Changes) -> None:
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

    # ---- what writers hold -----------------------------------------------------------------------

    def reserve(self, totals: Totals, bytes_: int) -> None:
        """Enter bytes that ``hold`` has taken."""
        totals.reserved_bytes += bytes_
        self._file.save(totals)

    def hold(self, reserved_bytes: int, pins: Counter[Name]) -> None:
        """Hold so much more. The others see it even when we die.

        Raises:
            OSError: it cannot be written down; nothing is held.
        """
        self._pins += pins
        self._reserved_bytes += reserved_bytes
        try:
            self._save_hold()
        except OSError:
            self._pins -= pins
            self._reserved_bytes -= reserved_bytes
            raise

    def let_go(self, totals: Totals, reserved_bytes: int, pins: Counter[Name]) -> None:
        """Hold so much less."""
        self._pins -= pins
        self._reserved_bytes -= reserved_bytes
        self._save_hold()
        if reserved_bytes:
            totals.reserved_bytes -= reserved_bytes
            self._file.save(totals)

    def converted(self, bytes_: int) -> None:
        """So many reserved bytes are in published files now; ``commit`` writes it down."""
        self._reserved_bytes -= bytes_

    def reap(self, totals: Totals) -> int:
        """Take dead writers' reservations out of the books; by how much the sum changed, bytes."""
        before = totals.reserved_bytes
        totals.reserved_bytes = self._sum_of_holds()
        self._file.save(totals)
        return totals.reserved_bytes - before

    def pinned(self) -> set[Name]:
        """What any writer has pinned."""
        pinned = set(self._pins)
        for _reserved, pins in self._holds():
            pinned.update(pins)
        return pinned

    def stranger(self) -> Path | None:
        """The folder of a writer that keeps no account."""
        folders = (path for path in self._tmp.iterdir() if path.is_dir())
        return next((path for path in folders if not (path / HOLD_FILE).exists()), None)

    def remove_abandoned(self) -> None:
        """Remove the private files of dead writers."""
        remove_abandoned(self._tmp)

    # ---- inside ----------------------------------------------------------------------------------

    def _save_hold(self) -> None:
        if self._hold is not None:
            self._hold.save(self._reserved_bytes, self._pins)

    def _sum_of_holds(self) -> int:
        """What living writers have reserved; the private files of dead ones go first."""
        self.remove_abandoned()
        return self._reserved_bytes + sum(reserved for reserved, _pins in self._holds())

    def _holds(self) -> Iterator[tuple[int, list[Name]]]:
        """What the other writers hold."""
        for folder in list(self._tmp.iterdir()):
            hold = None if folder == self._own else read_hold(folder)
            if hold is not None:
                yield hold

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
