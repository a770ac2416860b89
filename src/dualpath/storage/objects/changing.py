"""One process's changes of the account: made on its newest version, until nobody was faster.

What a process holds and owes is known better here than in the account, where a lost answer may have
left something else; every change writes it down afresh.
"""

from __future__ import annotations

import errno
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from dualpath.storage.forest import Name
from dualpath.storage.limiter import remaining_s
from dualpath.storage.objects import ledger
from dualpath.storage.objects.bucket import Bucket, ObjectError
from dualpath.storage.objects.index import Index
from dualpath.storage.objects.ledger import LEASE_S, Account, Event, EventKind, Hold
from dualpath.storage.types import BlockId

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """What a change came to.

    Attributes:
        value: its result.
        reserve_bytes: to be reserved on top.
        write: whether there is anything to write.
        undo: called at once when it was not written after all, before the next version is seen.
    """

    value: T
    reserve_bytes: int = 0
    write: bool = True
    undo: Callable[[], None] | None = None


def nothing(account: Account) -> Step[None]:
    """A change that only writes down what this process holds and owes."""
    del account
    return Step(None)


@dataclass(slots=True)
class AccountWriter:
    """Everything here is used inside ``alone`` only.

    Attributes:
        index: kept current with every version of the account that is seen.
        reserved_bytes: what this process may put into the bucket, or is about to remove.
        pins: what must stay for this process.
        owed, owed_bytes: events that happened and are not in the account yet, and what they add.
        doubt: the account may say too much; somebody must list the bucket.
    """

    bucket: Bucket
    index: Index
    reserved_bytes: int = 0
    pins: Counter[Name] = field(default_factory=Counter)
    owed: list[Event] = field(default_factory=list)
    owed_bytes: int = 0
    doubt: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _changes: int = 0

    @contextmanager
    def alone(self, deadline: float) -> Iterator[None]:
        """No other thread of this process meanwhile.

        Raises:
            TimeoutError: not before ``deadline``.
        """
        if not self._mutex.acquire(timeout=remaining_s(deadline, time.monotonic())):
            raise TimeoutError(errno.ETIMEDOUT, "another thread holds the account")
        try:
            yield
        finally:
            self._mutex.release()

    def owe_published(self, arrived: Sequence[tuple[bytes, BlockId, int]]) -> None:
        """Blocks are in the bucket: to be entered with the next change."""
        now_s = time.time()
        for root, block, size in arrived:
            self.owed.append(Event(EventKind.PUBLISHED, root, block.key, block.parent, size, now_s))
            self.owed_bytes += size

    def newest(self) -> Account:
        """The account as it is; an empty one when there is none.

        Raises:
            OSError: it cannot be read.
        """
        found = ledger.load(self.bucket)
        return found[0] if found is not None else Account(inexact=True)

    def change(
        self, change: Callable[[Account], Step[T]], deadline: float, *, stay: bool = True
    ) -> T:
        """Change the account, together with all that is owed to it.

        Args:
            change: may be called several times, each time on the account as it is then.
            stay: False to take no part any more.

        Raises:
            TimeoutError: others were always faster.
            OSError: the account cannot be read or written. With ``doubt`` the change may yet
                appear in it.
        """
        pause_s = _FIRST_PAUSE_S
        number = self._changes = self._changes + 1
        while True:
            found = ledger.load(self.bucket)
            account, etag = found if found is not None else (Account(inexact=True), "")
            account.bury(time.time())
            # Before our own events come on top, whose numbers others may yet take.
            self.index.catch_up(account)
            hold = self._enter_own(account, number)
            step = change(account)
            if not step.write:
                return step.value
            hold.reserved_bytes += step.reserve_bytes
            if not stay:
                del account.writers[self.name]
            if self._save(account, etag, number, step.undo or _nothing_to_undo):
                break
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "others change the account all the time")
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self.reserved_bytes += step.reserve_bytes
        self.owed, self.owed_bytes, self.doubt = [], 0, False
        self.index.catch_up(account)
        return step.value

    def _enter_own(self, account: Account, number: int) -> Hold:
        for event in self.owed:
            account.note(event)
        account.published_bytes += self.owed_bytes
        account.inexact |= self.doubt
        pins = [root + key for root, key in self.pins.elements()]
        hold = Hold(self.reserved_bytes, pins, time.time() + LEASE_S, number)
        account.writers[self.name] = hold
        return hold

    def _save(self, account: Account, etag: str, number: int, undo: Callable[[], None]) -> bool:
        """Whether it was written; False, and undone, when somebody else was faster.

        Raises:
            OSError: neither; undone.
        """
        written = False
        try:
            ledger.save(self.bucket, account, etag)
            written = True
        except ObjectError as error:
            self.doubt |= error.uncertain
            written = error.uncertain and self._arrived(number)
            if not written and error.errno not in (errno.ESTALE, errno.EEXIST):
                raise
        finally:
            if not written:
                undo()
        return written

    def _arrived(self, number: int) -> bool:
        """Whether a change whose answer was lost is in the account."""
        found = ledger.load(self.bucket)
        own = found[0].writers.get(self.name) if found is not None else None
        return own is not None and own.change == number


def _nothing_to_undo() -> None:
    """What most changes leave behind when they were not written."""
