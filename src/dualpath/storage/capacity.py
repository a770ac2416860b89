"""A limit on the bytes in a store, held by all processes that share it.

At every moment published files and private files together have at most ``capacity_bytes``: room is
reserved before a private file is made, and a published file keeps the room it had. The books are in
``account``.

Without a limit the account is kept for the order of names and for pins, so that blocks may go when
the disk itself is full; nobody counts bytes then until somebody has to know them.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dualpath.storage.account import Account
from dualpath.storage.books import HOLD_STEP_BYTES, Totals
from dualpath.storage.counters import Counters
from dualpath.storage.forest import Forest, Name, StoredFile
from dualpath.storage.paths import block_path
from dualpath.storage.room import Changes, Ticket, settle_deadline, statuses_now
from dualpath.storage.tempdir import TempArea
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
        self.capacity_bytes = capacity_bytes
        self._limit_bytes = capacity_bytes or UNLIMITED_BYTES
        self._store = store
        self._counters = counters
        self._evicted: dict[bytes, list[bytes]] = {}
        self._reaped_s = float("-inf")
        self._account = Account(
            store, temp, limited=capacity_bytes > 0, counts=capacity_bytes > 0 or temp is None
        )

    @staticmethod
    def exists(store: Path) -> bool:
        """Whether somebody keeps account of this store."""
        return Account.exists(store)

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
        with self._account.locked(deadline) as totals:
            changes = Changes()
            self._account.begin(totals)
            try:
                yield changes
            finally:
                self._account.converted(changes.converted_bytes)
            # Only now: after an error that nobody foresaw the ledger stays dirty, and the next
            # holder counts.
            self._account.commit(totals, changes)

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``Room``."""
        with self._account.locked(deadline):
            self._account.hold(0, Counter([(root, key)]))

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``Room``."""
        self._give_back(0, Counter([(root, key)]))

    def make_room(self, wanted_bytes: int, deadline: float, spared: Collection[Name] = ()) -> int:
        """See ``Room``. Nothing goes while a writer lives that keeps no account, for it has pinned
        nothing and publishes without asking.

        Args:
            spared: blocks that stay beside those that are pinned.
        """
        with self._account.indexed(deadline) as (totals, forest):
            self._account.remove_abandoned()
            if stranger := self._account.stranger():
                log.warning(
                    "store %s: the disk is full, and nothing can be evicted while the writer of %s "
                    "keeps no account: give all engines the same storage.capacity",
                    self._store, stranger,
                )  # fmt: skip
                return 0
            gone = self._evict(totals, forest, wanted_bytes, self._account.pinned() | set(spared))
        freed = sum(size_bytes for _root, _block, size_bytes in gone)
        self._counters.add("storage_disk_full_bytes", freed)
        return freed

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``Room``."""
        with self._account.guard:
            evicted, self._evicted = self._evicted, {}
        return evicted

    def close(self) -> None:
        """See ``Room``."""
        self._account.close()

    # ---- for maintenance -------------------------------------------------------------------------

    def usage(self, deadline: float) -> Totals:
        """The present totals; reservations of dead writers may still be in them. Where nobody
        keeps to a limit they may be not ``counted``.

        Raises:
            OSError: as ``Room.changing``.
        """
        with self._account.locked(deadline) as totals:
            return replace(totals)

    def shrink(self, target_bytes: int, latest_s: float, deadline: float) -> Shrunk:
        """Evict until at most ``target_bytes`` are published, sparing what is pinned and what was
        used after ``latest_s`` (seconds since 1970).

        Raises:
            OSError: as ``Room.changing``.
        """
        removed: list[tuple[bytes, BlockId, int]] = []
        while True:
            with self._account.indexed(deadline) as (totals, forest):
                excess = totals.published_bytes - target_bytes
                pinned = self._account.pinned()
                gone = self._evict(totals, forest, excess, pinned, latest_s, _EVICT_AT_ONCE)
                removed += gone
                if len(gone) < _EVICT_AT_ONCE:
                    return Shrunk(removed, totals.published_bytes)

    # ---- inside ----------------------------------------------------------------------------------

    def _join(self, deadline: float) -> None:
        self._account.join(deadline)
        with self._account.locked(deadline) as totals:
            excess = self._excess(totals, 0)
        if excess > 0:
            with self._account.indexed(deadline) as (totals, forest):
                self._evict(totals, forest, self._excess(totals, 0), self._account.pinned())

    def _admit(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        file_bytes: int,
        pins: Counter[Name],
        deadline: float,
    ) -> Ticket:
        with self._account.locked(deadline) as totals:
            ticket = self._reserve(root, blocks, file_bytes, pins, totals, None)
        if ticket is None:
            with self._account.indexed(deadline) as (totals, forest):
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
            self._evict(totals, forest, excess, self._account.pinned() | set(pins))
            excess = self._excess(totals, wanted)
        over = max(0, -(-excess // file_bytes))
        # The last ones go without: a block is of no use without those before it.
        for index in range(len(blocks) - 1, -1, -1):
            if over and statuses[index] is None:
                statuses[index] = WriteStatus.FULL
                over -= 1
        granted = statuses.count(None) * file_bytes
        self._account.hold(granted, pins)
        self._account.reserve(totals, granted)
        return Ticket(statuses, granted)

    def _excess(self, totals: Totals, wanted_bytes: int) -> int:
        """Bytes too many if ``wanted_bytes`` came on top, without what dead writers held."""
        excess = totals.published_bytes + totals.reserved_bytes + wanted_bytes - self._limit_bytes
        now = time.monotonic()
        if excess <= 0 or now - self._reaped_s < _REAP_INTERVAL_S:
            return excess
        self._reaped_s = now
        return excess + self._account.reap(totals)

    def _give_back(self, left_bytes: int, pins: Counter[Name]) -> None:
        try:
            with self._account.locked(settle_deadline()) as totals:
                self._account.let_go(totals, left_bytes, pins)
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
                self._account.begin(totals)
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
            self._account.commit(totals, changes)
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
