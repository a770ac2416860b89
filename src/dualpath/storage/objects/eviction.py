"""Making room in a bucket: claim blocks in the account, remove them, and then use their room."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from dualpath.storage.counters import Counters
from dualpath.storage.forest import Name, StoredFile
from dualpath.storage.objects.bucket import ObjectError
from dualpath.storage.objects.changing import AccountWriter, Step
from dualpath.storage.objects.ledger import Account, Event, EventKind
from dualpath.storage.objects.names import block_object

log = logging.getLogger(__name__)

EVICT_AT_ONCE: Final = 128
"""Blocks claimed with one change of the account; its log holds twice as many."""
_RECOUNT_AFTER_S: Final = 5.0
"""A listing that did not settle the doubt is not repeated sooner."""


@dataclass(slots=True)
class Evictor:
    """Used inside ``AccountWriter.alone`` only.

    Attributes:
        pool: threads for removals.
        evicted: keys by root of what went.
    """

    writer: AccountWriter
    counters: Counters
    pool: ThreadPoolExecutor
    evicted: dict[bytes, list[bytes]] = field(default_factory=dict)
    _unsettled_s: float = float("-inf")

    def count(self, deadline: float) -> None:
        """List the bucket; enter its bytes, unless somebody changes the account meanwhile.

        Raises:
            OSError: the bucket cannot be listed, or the account not be changed.
        """
        before = self.writer.newest()
        listed = before.sequence
        total = self.writer.index.relist(before)

        def change(account: Account) -> Step[bool]:
            if account.sequence - len(self.writer.owed) != listed:
                return Step(False)  # it is out of date already
            account.published_bytes = total
            # What somebody is sending may be among the listed, and will be entered once more.
            account.inexact = account.reserved_bytes > 0
            return Step(not account.inexact)

        settled = self.writer.change(change, deadline)
        self._unsettled_s = float("-inf") if settled else time.monotonic()

    def make_room(
        self, wanted_bytes: int, limit_bytes: int, pins: Collection[Name], deadline: float
    ) -> bool:
        """Evict for ``wanted_bytes``; whether anything has changed that makes it worth asking
        again.

        Raises:
            OSError: as ``count``.
        """
        if not limit_bytes:
            return False
        if self._doubtful(wanted_bytes, limit_bytes, deadline):
            self.count(deadline)
            return True
        return bool(self.evict(wanted_bytes, limit_bytes, pins, float("inf"), deadline))

    def evict(
        self,
        wanted_bytes: int,
        limit_bytes: int,
        pins: Collection[Name],
        latest_s: float,
        deadline: float,
    ) -> list[StoredFile]:
        """Remove what must go for ``wanted_bytes`` to fit, ``EVICT_AT_ONCE`` at most, sparing what
        is pinned and what was used after ``latest_s``.

        Raises:
            OSError: as ``count``; nothing was removed.
        """
        writer = self.writer
        claimed: list[StoredFile] = []

        def undo() -> None:
            while claimed:
                file = claimed.pop()
                writer.index.put_back(file)
                if writer.doubt:  # the claim may yet arrive: rather count too much
                    writer.owed_bytes += file.size_bytes

        def claim(account: Account) -> Step[bool]:
            if not writer.index.ready:
                return Step(False, write=False)
            excess = account.held_bytes + wanted_bytes - limit_bytes
            pinned = account.pinned() | set(pins) | set(writer.pins)
            claimed.extend(writer.index.take(excess, pinned, latest_s, EVICT_AT_ONCE))
            for file in claimed:
                account.published_bytes -= file.size_bytes
                account.note(_removal(file))
            hold = account.writers[writer.name]
            hold.claimed = [file.root + file.block.key for file in claimed]
            total = sum(file.size_bytes for file in claimed)
            return Step(True, total, write=bool(claimed), undo=undo)

        while not writer.change(claim, deadline):
            writer.index.relist(writer.newest())
        return self._remove(claimed)

    def _doubtful(self, wanted_bytes: int, limit_bytes: int, deadline: float) -> bool:
        """Whether a listing may show that there is room after all."""

        def look(account: Account) -> Step[bool]:
            lacks = account.held_bytes + wanted_bytes > limit_bytes
            return Step(account.inexact and lacks, write=False)

        doubt = self.writer.change(look, deadline)
        return doubt and time.monotonic() - self._unsettled_s > _RECOUNT_AFTER_S

    def _remove(self, claimed: list[StoredFile]) -> list[StoredFile]:
        gone: list[StoredFile] = []
        for file, removed in zip(claimed, self.pool.map(self._delete, claimed), strict=True):
            self.writer.reserved_bytes -= file.size_bytes
            if removed:
                gone.append(file)
                self.evicted.setdefault(file.root, []).append(file.block.key)
            else:
                self.counters.add("storage_evict_failed")
                self.writer.owe_published([(file.root, file.block, file.size_bytes)])
        self.counters.add("storage_evicted_blocks", len(gone))
        self.counters.add("storage_evicted_bytes", sum(file.size_bytes for file in gone))
        return gone

    def _delete(self, file: StoredFile) -> bool:
        try:
            self.writer.bucket.delete(block_object(file.root, file.block))
        except ObjectError as error:
            log.debug("cannot evict %s: %s", file.block.key.hex(), error)
            return False
        return True


def _removal(file: StoredFile) -> Event:
    return Event(
        EventKind.REMOVED, file.root, file.block.key, file.block.parent, file.size_bytes,
        time.time(),
    )  # fmt: skip
