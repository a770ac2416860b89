"""The files in which processes that share a store keep account of its bytes.

::

    <store>/capacity/ledger     totals, under an flock that is held for every change
    <store>/capacity/log        what was published and removed, for those who keep an index
    <store>/capacity/members    flock, shared, held by every open store: who is first counts anew
    <store>/tmp/<writer>/hold   what one writer has reserved, and which blocks must stay for it

A holder of the lock that changes names first writes the ledger as *dirty*. If it dies there, the
next one finds the flag and counts the directory, or where nobody keeps to a limit notes that this
has not been done. A writer's hold dies with its folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualpath.blocks import KEY_BYTES
from dualpath.storage.forest import Name
from dualpath.storage.types import BlockId

CAPACITY_DIR: Final = "capacity"
HOLD_FILE: Final = "hold"
LOG_LIMIT_BYTES: Final = 16 << 20
"""A log of this length is begun afresh; processes that keep an index list the store again."""
_LOCK_POLL_S: Final = 0.0005
_CRC: Final = struct.Struct("<I")
_LEDGER: Final = struct.Struct("<8sQQQQB")
_LEDGER_MAGIC: Final = b"DPLEDGR1"
_ENTRY: Final = struct.Struct("<?32s32s32sQ")
_HOLD: Final = struct.Struct("<8sQI")
_HOLD_MAGIC: Final = b"DPHOLD01"
_NAME_BYTES: Final = 2 * KEY_BYTES
HOLD_STEP_BYTES: Final = 16 << 10
"""A hold file grows by so much, so that most changes need no room on the disk."""
_DIRTY, _UNCOUNTED = 1, 2


@dataclass(slots=True)
class Totals:
    """What the ledger says.

    Attributes:
        generation: counts how often the log was begun afresh.
        log_bytes: valid length of the log.
        published_bytes: sizes of all published files; means nothing while not ``counted``.
        reserved_bytes: what writers may still put on the disk; too high after a writer's death,
            until the holds are summed up again.
        dirty: a change was begun and not finished.
        counted: somebody has counted the files since the account was begun. Who keeps to no limit
            need not.
    """

    generation: int = 0
    log_bytes: int = 0
    published_bytes: int = 0
    reserved_bytes: int = 0
    dirty: bool = False
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log.

    Attributes:
        added: published, else removed.
    """

    added: bool
    root: bytes
    block: BlockId
    size_bytes: int


class LedgerFile:
    """Ledger and log. Used by one thread at a time; ``lock`` keeps other processes out.

    Plain reads and writes under the lock, no mapping: network file systems keep those coherent.
    """

    def __init__(self, store: Path) -> None:
        """Open, making them when missing.

        Raises:
            OSError: they cannot be opened.
        """
        folder = store / CAPACITY_DIR
        folder.mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._ledger = os.open(folder / "ledger", flags, 0o666)
        try:
            self._log = os.open(folder / "log", flags, 0o666)
        except OSError:
            os.close(self._ledger)
            raise

    def lock(self, deadline: float) -> None:
        """Take the lock.

        Raises:
            TimeoutError: it is not free before ``deadline``.
            OSError: no locks here, or the store was removed.
        """
        take_lock(self._ledger, fcntl.LOCK_EX, deadline)
        if not os.fstat(self._ledger).st_nlink:
            self.unlock()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def unlock(self) -> None:
        """Give the lock back."""
        fcntl.flock(self._ledger, fcntl.LOCK_UN)

    def load(self) -> Totals | None:
        """The totals; None when there are none that can be trusted."""
        raw = os.pread(self._ledger, _LEDGER.size + _CRC.size, 0)
        if len(raw) < _LEDGER.size + _CRC.size:
            return None
        body = raw[: _LEDGER.size]
        magic, generation, log_bytes, published, reserved, flags = _LEDGER.unpack(body)
        if magic != _LEDGER_MAGIC or _CRC.unpack_from(raw, _LEDGER.size)[0] != zlib.crc32(body):
            return None
        return Totals(
            generation, log_bytes, published, reserved,
            dirty=bool(flags & _DIRTY), counted=not flags & _UNCOUNTED,
        )  # fmt: skip

    def save(self, totals: Totals) -> None:
        """Write the totals over the old ones, which takes no further room on the disk."""
        body = _LEDGER.pack(
            _LEDGER_MAGIC, totals.generation, totals.log_bytes, totals.published_bytes,
            totals.reserved_bytes, _DIRTY * totals.dirty | _UNCOUNTED * (not totals.counted),
        )  # fmt: skip
        _write(self._ledger, body + _CRC.pack(zlib.crc32(body)), 0)

    def append(self, totals: Totals, entries: Collection[Entry]) -> bool:
        """Add to the log behind ``totals``, which the caller saves.

        Returns:
            False when the log was begun afresh instead, without these entries: it was long
            enough, or there is no room on the disk.
        """
        raw = b"".join(
            _ENTRY.pack(e.added, e.root, e.block.key, e.block.parent, e.size_bytes) for e in entries
        )
        if totals.log_bytes + len(raw) <= LOG_LIMIT_BYTES:
            try:
                _write(self._log, raw, totals.log_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
            else:
                totals.log_bytes += len(raw)
                return True
        self.begin_log(totals)
        return False

    def begin_log(self, totals: Totals) -> None:
        """Empty the log: everybody's index is out of date."""
        os.ftruncate(self._log, 0)
        totals.generation += 1
        totals.log_bytes = 0

    def entries(self, start: int, end: int) -> Iterator[Entry]:
        """The log between two offsets."""
        raw = os.pread(self._log, end - start, start)
        if len(raw) != end - start:
            raise OSError(errno.EIO, "the capacity log is shorter than its ledger says")
        for added, root, key, parent, size in _ENTRY.iter_unpack(raw):
            yield Entry(added, root, BlockId(key, parent), size)

    def close(self) -> None:
        """Let go of both files."""
        os.close(self._log)
        os.close(self._ledger)


class HoldFile:
    """What one writer has reserved and pinned. Written and read under the ledger's lock only."""

    def __init__(self, folder: Path) -> None:
        """Make it, empty.

        Raises:
            OSError: it cannot be made.
        """
        self._fd = os.open(folder / HOLD_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._length = 0

    def save(self, reserved_bytes: int, pins: Collection[Name]) -> None:
        """Replace the content.

        Raises:
            OSError: no room for more pins; the old content stands.
        """
        names = b"".join(root + key for root, key in pins)
        body = _HOLD.pack(_HOLD_MAGIC, reserved_bytes, len(pins)) + names
        raw = body + _CRC.pack(zlib.crc32(body))
        if len(raw) > self._length:
            # Room first: a write that stops in the middle would spoil what stands there.
            steps = -(-len(raw) // HOLD_STEP_BYTES)
            os.posix_fallocate(self._fd, 0, steps * HOLD_STEP_BYTES)
            self._length = steps * HOLD_STEP_BYTES
        _write(self._fd, raw, 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def read_hold(folder: Path) -> tuple[int, list[Name]] | None:
    """Bytes reserved and names pinned by the writer of ``folder``; None when it holds nothing.

    Raises:
        OSError: it is there and cannot be read, or its content makes no sense.
    """
    try:
        raw = (folder / HOLD_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None  # it has never reserved anything, or is no writer's folder
    magic, reserved, count = _HOLD.unpack_from(raw.ljust(_HOLD.size, b"\0"))
    if magic == bytes(len(_HOLD_MAGIC)):
        return None  # about to be written for the first time
    end = _HOLD.size + count * _NAME_BYTES
    if magic != _HOLD_MAGIC or raw[end : end + _CRC.size] != _CRC.pack(zlib.crc32(raw[:end])):
        raise OSError(errno.EIO, f"{folder / HOLD_FILE} is damaged")
    starts = range(_HOLD.size, end, _NAME_BYTES)
    pins = [(raw[at : at + KEY_BYTES], raw[at + KEY_BYTES : at + _NAME_BYTES]) for at in starts]
    return reserved, pins


def take_lock(fd: int, kind: int, deadline: float) -> None:
    """flock with a deadline.

    Raises:
        TimeoutError: not free before ``deadline`` (``time.monotonic()``).
        OSError: no locks on this file system.
    """
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock") from None
            time.sleep(_LOCK_POLL_S)
        else:
            return


def _write(fd: int, data: bytes, offset: int) -> None:
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
