"""A limit on the bytes in a bucket, held by all processes that write to it.

At every moment what is in the bucket is at most what the account says, published and reserved:
room is reserved before a block is sent, and a block that goes is counted until it is gone. Where a
death or a lost answer leaves doubt the account says too much, never too little, and is set right
by the next listing.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dualpath.storage.counters import Counters
from dualpath.storage.forest import Name, StoredFile
from dualpath.storage.objects import ledger
from dualpath.storage.objects.account import ObjectTicket
from dualpath.storage.objects.bucket import Bucket
from dualpath.storage.objects.changing import AccountWriter, Step, nothing
from dualpath.storage.objects.eviction import EVICT_AT_ONCE, Evictor
from dualpath.storage.objects.index import Index
from dualpath.storage.objects.ledger import Account, Event, EventKind
from dualpath.storage.room import settle_deadline
from dualpath.storage.types import BlockId, WriteStatus, status_of

log = logging.getLogger(__name__)

_OPEN_DEADLINE_S: Final = 120.0


class Capacity:
    """A ``BlockAccount`` with a limit: one process's part in the account of a bucket.

    Any thread may call; calls wait for the server.

    Args:
        capacity_bytes: 0 to keep account without a limit.
        pool: threads for removals.
    """

    def __init__(
        self, bucket: Bucket, capacity_bytes: int, counters: Counters, pool: ThreadPoolExecutor
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._bucket = bucket
        self._index = Index(bucket)
        self._writer = AccountWriter(bucket, self._index)
        self._evictor = Evictor(self._writer, counters, pool)

    def join(self) -> None:
        """Take part as a writer. Whoever is alone counts; what is too much is evicted.

        Raises:
            OSError: the account cannot be used.
        """
        deadline = time.monotonic() + _OPEN_DEADLINE_S
        with self._writer.alone(deadline):
            found = ledger.load(self._bucket)
            if found is not None:
                found[0].bury(time.time())
            if found is None or not found[0].writers:
                self._evictor.count(deadline)
            else:
                self._writer.change(nothing, deadline)
            while self._evictor.make_room(0, self.capacity_bytes, (), deadline):
                self._writer.change(nothing, deadline)  # they are gone: say so

    @contextmanager
    def admit(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        statuses: Sequence[WriteStatus | None],
        file_bytes: int,
        deadline: float,
    ) -> Iterator[ObjectTicket]:
        """See ``BlockAccount``."""
        # Its own blocks too: room for the last must not be made by removing the first.
        pins = Counter({(root, key) for block in blocks for key in (block.key, block.parent)})
        try:
            ticket = self._admit(statuses, file_bytes, pins, deadline)
        except OSError as error:
            log.warning("no leave to write in %s: %s", self._bucket.where, error)
            code = status_of(error.errno or errno.EIO)
            yield ObjectTicket([status or code for status in statuses])
            return
        try:
            yield ticket
        finally:
            self._settle(ticket, pins)

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``Store``. All processes learn by it that the block is in use."""
        used = Event(EventKind.USED, root, key, b"", 0, time.time())

        def change(account: Account) -> Step[None]:
            account.note(used)
            return Step(None)

        with self._writer.alone(deadline):
            self._writer.pins[root, key] += 1
            try:
                self._writer.change(change, deadline)
            except OSError:
                self._writer.pins -= Counter([(root, key)])
                raise

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``Store``."""
        self._settle(ObjectTicket([]), Counter([(root, key)]))

    def used(self, root: bytes, blocks: Sequence[BlockId]) -> None:
        """See ``BlockAccount``."""
        self._index.used(root, blocks, time.time())

    def gone(self, root: bytes, block: BlockId) -> None:
        """See ``BlockAccount``. How many bytes went is not known: somebody must list."""
        event = Event(EventKind.REMOVED, root, block.key, block.parent, 0, time.time())
        self._settle(ObjectTicket([], uncertain=True), Counter(), [event])

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``Store``."""
        with self._writer.alone(float("inf")):  # as in ``_settle``
            evicted, self._evictor.evicted = self._evictor.evicted, {}
        return evicted

    def shrink(
        self, target_bytes: int, latest_s: float, deadline: float
    ) -> tuple[list[StoredFile], int]:
        """Evict until at most ``target_bytes`` are held, sparing what is pinned and what was used
        after ``latest_s`` (seconds since 1970). Returns what went, and the bytes left.

        Raises:
            OSError: the account cannot be used.
        """
        with self._writer.alone(deadline):
            # What is in doubt, and when blocks were written, a listing knows.
            self._evictor.count(deadline)
            gone: list[StoredFile] = []
            while True:
                part = self._evictor.evict(0, target_bytes, (), latest_s, deadline)
                gone += part
                if len(part) < EVICT_AT_ONCE:
                    break
            left = self._writer.change(lambda account: Step(account.published_bytes), deadline)
        return gone, left

    def leave(self) -> None:
        """See ``BlockAccount``. Other processes are told if the server can be reached."""
        try:
            with self._writer.alone(settle_deadline()):
                self._writer.pins.clear()
                self._writer.change(nothing, settle_deadline(), stay=False)
        except OSError as error:
            # The lease ends by itself; what was published and not entered is found by counting.
            log.warning("%s: the account keeps this writer for a while: %s",
                        self._bucket.where, error)  # fmt: skip

    def _admit(
        self,
        statuses: Sequence[WriteStatus | None],
        file_bytes: int,
        pins: Counter[Name],
        deadline: float,
    ) -> ObjectTicket:
        wanted_bytes = list(statuses).count(None) * file_bytes
        writer = self._writer
        with writer.alone(deadline):
            writer.pins += pins
            try:
                force = False
                while True:
                    reserve = _Reserve(statuses, file_bytes, self.capacity_bytes, force)
                    ticket = writer.change(reserve, deadline)
                    if ticket is not None:
                        return ticket
                    force = not self._evictor.make_room(
                        wanted_bytes, self.capacity_bytes, pins, deadline
                    )
            except OSError:
                writer.pins -= pins
                raise

    def _settle(
        self, ticket: ObjectTicket, pins: Counter[Name], events: Sequence[Event] = ()
    ) -> None:
        writer = self._writer
        try:
            # Without an end of its own: whoever has it asks the server within bounds, and what we
            # hold must not be forgotten.
            with writer.alone(float("inf")):
                writer.pins -= pins
                writer.reserved_bytes -= ticket.granted_bytes
                writer.doubt |= ticket.uncertain
                writer.owed += events
                writer.owe_published(ticket.arrived)
                writer.change(nothing, settle_deadline())
        except OSError as error:
            # The account still has all of it as reserved; the next change sets that right.
            log.warning("%s: account not up to date yet: %s", self._bucket.where, error)


@dataclass(frozen=True, slots=True)
class _Reserve:
    """A change that reserves room for blocks.

    Attributes:
        force: do with what room there is; else nothing is changed, and no ticket given, where it
            is not enough.
    """

    statuses: Sequence[WriteStatus | None]
    file_bytes: int
    capacity_bytes: int
    force: bool

    def __call__(self, account: Account) -> Step[ObjectTicket | None]:
        statuses = list(self.statuses)
        wanted = statuses.count(None) * self.file_bytes
        excess = account.held_bytes + wanted - self.capacity_bytes if self.capacity_bytes else 0
        if excess > 0 and not self.force:
            return Step(None, write=False)
        over = max(0, -(-excess // self.file_bytes))
        # The last ones go without: a block is of no use without those before it.
        for index in range(len(statuses) - 1, -1, -1):
            if over and statuses[index] is None:
                statuses[index] = WriteStatus.FULL
                over -= 1
        granted = statuses.count(None) * self.file_bytes
        return Step(ObjectTicket(statuses, granted), granted)
