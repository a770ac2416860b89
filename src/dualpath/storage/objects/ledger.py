"""The account of a bucket's bytes: one small object that everybody replaces, never overwrites.

Each change reads the object and writes it back on the condition that nobody has written in between
(``If-Match``). So all processes see the same account, without locks.

The object also holds the latest events, by which a process keeps its index of the store current;
one that missed some lists the bucket again.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterator
from typing import Final

import msgspec

from dualpath.blocks import KEY_BYTES
from dualpath.storage.forest import Name
from dualpath.storage.objects.bucket import Bucket, ObjectError
from dualpath.storage.objects.names import CAPACITY_OBJECT
from dualpath.storage.types import BlockId

KEPT_EVENTS: Final = 256
"""Events in the object: some 30 kB, which is little beside a block."""
LEASE_S: Final = 900.0
"""A writer that has not written the account for so long is dead."""
_VERSION: Final = 1


class EventKind(enum.IntEnum):
    """What happened to a block."""

    REMOVED = 0
    PUBLISHED = 1
    USED = 2


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One line of the log.

    Attributes:
        root, key, parent: the block; ``parent`` is empty where it does not matter.
        size_bytes: of its object.
        at_s: seconds since 1970.
    """

    kind: int
    root: bytes
    key: bytes
    parent: bytes
    size_bytes: int
    at_s: float

    @property
    def block(self) -> BlockId:
        """The block."""
        return BlockId(self.key, self.parent)


class Hold(msgspec.Struct):
    """What one writer holds.

    Attributes:
        reserved_bytes: what it may put into the bucket, or has and not entered yet.
        pins: roots and keys, joined; as often as they are pinned.
        until_s: end of its lease, seconds since 1970.
        change: number of its latest change, by which it recognises its own.
        claimed: roots and keys, joined, of blocks that it is removing. A listing may show them
            still; nobody else may count or claim them.
    """

    reserved_bytes: int = 0
    pins: list[bytes] = msgspec.field(default_factory=list)
    until_s: float = 0.0
    change: int = 0
    claimed: list[bytes] = msgspec.field(default_factory=list)


class Account(msgspec.Struct):
    """What the object says.

    Attributes:
        published_bytes: sizes of all blocks; never less than the truth.
        inexact: it may be more than the truth; a listing sets it right.
        sequence: number of the latest event.
        events: the latest ones, the newest last.
        writers: who takes part.
    """

    version: int = _VERSION
    published_bytes: int = 0
    inexact: bool = False
    sequence: int = 0
    events: list[Event] = msgspec.field(default_factory=list)
    writers: dict[str, Hold] = msgspec.field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """What all writers hold."""
        return sum(hold.reserved_bytes for hold in self.writers.values())

    @property
    def held_bytes(self) -> int:
        """Published and reserved: what must stay within the capacity."""
        return self.published_bytes + self.reserved_bytes

    def pinned(self) -> set[Name]:
        """Blocks that nobody may evict."""
        return {_split(pin) for hold in self.writers.values() for pin in hold.pins}

    def claimed(self) -> set[Name]:
        """Blocks that are being removed."""
        return {_split(name) for hold in self.writers.values() for name in hold.claimed}

    def bury(self, now_s: float) -> None:
        """Take the dead out. What they had reserved may be in the bucket: it counts until the
        next listing."""
        for name, hold in list(self.writers.items()):
            if hold.until_s < now_s:
                self.published_bytes += hold.reserved_bytes
                self.inexact |= hold.reserved_bytes > 0
                del self.writers[name]

    def note(self, event: Event) -> None:
        """Add an event to the log."""
        self.sequence += 1
        self.events.append(event)
        del self.events[:-KEPT_EVENTS]

    def since(self, sequence: int) -> Iterator[Event] | None:
        """Events after ``sequence``; None when some of them are not kept any more."""
        missing = self.sequence - sequence
        if not 0 <= missing <= len(self.events):
            return None
        return iter(self.events[len(self.events) - missing :])


def _split(name: bytes) -> Name:
    return name[:KEY_BYTES], name[KEY_BYTES:]


def load(bucket: Bucket) -> tuple[Account, str] | None:
    """The account and its etag; None when nobody keeps one.

    Raises:
        OSError: it cannot be had, or is none.
    """
    found = bucket.fetch(CAPACITY_OBJECT)
    if found is None:
        return None
    raw, etag = found
    try:
        account = msgspec.msgpack.decode(raw, type=Account)
    except msgspec.MsgspecError as error:
        text = f"{CAPACITY_OBJECT} in {bucket.where} is damaged ({error}); remove it to count anew"
        raise ObjectError(errno.EIO, text, CAPACITY_OBJECT) from None
    if account.version != _VERSION:
        text = f"{CAPACITY_OBJECT} in {bucket.where} has version {account.version}, not {_VERSION}"
        raise ObjectError(errno.EIO, text, CAPACITY_OBJECT)
    return account, etag


def save(bucket: Bucket, account: Account, etag: str) -> None:
    """Replace the version ``etag``, or make the first one when that is empty.

    Raises:
        ObjectError: ESTALE or EEXIST, somebody else was faster; or as ``Bucket.put``.
    """
    raw = msgspec.msgpack.encode(account)
    bucket.put(CAPACITY_OBJECT, raw, absent=not etag, etag=etag)


def exists(bucket: Bucket) -> bool:
    """Whether somebody keeps account of this bucket.

    Raises:
        ObjectError: no answer.
    """
    return bucket.head(CAPACITY_OBJECT) is not None
