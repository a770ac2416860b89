"""The rate limit of a node's storage NIC, shared by every process of the node.

A limiter is a virtual clock: the moment at which the NIC will have passed everything granted so
far. A grant of n bytes moves it by n / rate and tells the caller when its bytes are through. That
is O(1), first come first served, and needs no helper process. Fairness between a big and a small
read comes from the callers asking block by block (see ``pace_blocks``), which interleaves them.

The clock lives in a small memory-mapped file under an flock. A holder that is killed loses the
lock with its descriptor. The file has two checksummed records that are written in turn, so a
holder killed in the middle of one leaves the other, one grant older.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dualpath.storage.types import StoreError

SLACK_S: Final = 0.01
"""A grant may start this far in the past, so that a waiter that wakes up late loses no bandwidth.
Over any span T, at most rate * (T + SLACK_S) bytes are granted."""
PACE_S: Final = 0.02
"""A paced caller asks for about this much NIC time at once."""

_RECORD: Final = struct.Struct("<8sddQQ")
_CRC: Final = struct.Struct("<I")
_RECORD_STRIDE_BYTES: Final = 64
_MAGIC: Final = b"DPLIMIT1"
_FILE_BYTES: Final = 4096
_LOCK_POLL_S: Final = 0.0005


class Clock(Protocol):
    """Time as a limiter sees it; tests pass their own."""

    def now(self) -> float:
        """Seconds of a clock that all processes of the machine share and that never goes back,
        except at a reboot."""

    def sleep(self, seconds: float) -> None:
        """Return when ``seconds`` have passed."""


class MonotonicClock:
    """CLOCK_MONOTONIC."""

    def now(self) -> float:
        """See ``Clock``."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See ``Clock``."""
        time.sleep(seconds)


def remaining_s(deadline: float, now: float) -> float:
    """Seconds left, as a timeout that any wait accepts (an infinite one is not)."""
    return min(max(0.0, deadline - now), threading.TIMEOUT_MAX)


@dataclass(frozen=True, slots=True)
class ClockState:
    """What all users of a limiter share.

    Attributes:
        next_free_s: when everything granted so far has passed.
        last_now_s: time of the latest grant; a clock below it means the machine was rebooted.
        granted_bytes, grants: totals since the state was made.
    """

    next_free_s: float = -math.inf
    last_now_s: float = -math.inf
    granted_bytes: int = 0
    grants: int = 0


def grant(
    state: ClockState, now_s: float, nbytes: int, rate_bytes_s: float, latest_s: float
) -> ClockState | None:
    """Account for ``nbytes``: the new state, whose ``next_free_s`` is when they have passed.

    None, and nothing accounted for, when that would be after ``latest_s``.
    """
    next_free = state.next_free_s if now_s >= state.last_now_s else -math.inf
    finish = max(next_free, now_s - SLACK_S) + nbytes / rate_bytes_s
    if finish > latest_s:
        return None
    return ClockState(finish, now_s, state.granted_bytes + nbytes, state.grants + 1)


class _StateFile:
    """The shared state, mapped. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Growing is idempotent: whoever comes second changes nothing.
            if os.fstat(self._fd).st_size < _FILE_BYTES:
                os.ftruncate(self._fd, _FILE_BYTES)
            self._map = mmap.mmap(self._fd, _FILE_BYTES)
        except OSError:
            os.close(self._fd)
            raise

    def lock(self, clock: Clock, deadline: float) -> bool:
        """Take the file's lock; False when ``deadline`` comes first."""
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Held for microseconds, unless its holder was stopped: hence the deadline.
                if clock.now() >= deadline:
                    return False
                clock.sleep(_LOCK_POLL_S)
            else:
                return True

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def load(self) -> ClockState:
        """The newer of the two records; a fresh state when neither is valid."""
        return max((self._record(index) for index in (0, 1)), key=lambda state: state.grants)

    def save(self, state: ClockState) -> None:
        """Write over the older record."""
        record = _RECORD.pack(
            _MAGIC, state.next_free_s, state.last_now_s, state.granted_bytes, state.grants
        )
        start = (state.grants % 2) * _RECORD_STRIDE_BYTES
        record += _CRC.pack(zlib.crc32(record))
        self._map[start : start + len(record)] = record

    def _record(self, index: int) -> ClockState:
        start = index * _RECORD_STRIDE_BYTES
        end = start + _RECORD.size
        magic, next_free, last_now, granted, grants = _RECORD.unpack_from(self._map, start)
        (crc,) = _CRC.unpack_from(self._map, end)
        if magic != _MAGIC or crc != zlib.crc32(self._map[start:end]):
            return ClockState()
        return ClockState(next_free, last_now, granted, grants)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


@dataclass(slots=True, eq=False)
class Limiter:
    """One direction of one NIC. Made by ``unlimited`` or ``shared``. Thread safe.

    Attributes:
        rate_bytes_s: the limit; infinity for none.
    """

    rate_bytes_s: float
    _path: Path | None = None
    _clock: Clock = field(default_factory=MonotonicClock)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _file: _StateFile | None = None
    _own: ClockState = field(default_factory=ClockState)

    @classmethod
    def unlimited(cls) -> Limiter:
        """A limiter that never waits and counts this process's bytes only."""
        return cls(math.inf)

    @classmethod
    def shared(
        cls, directory: str | Path, name: str, rate_bytes_s: float, clock: Clock | None = None
    ) -> Limiter:
        """The limiter called ``name``, common to all processes that name it in ``directory``.

        Args:
            directory: on this machine's own disk (a monotonic clock means nothing elsewhere);
                made when missing.
            name: node and direction, such as ``n0-read``.
            rate_bytes_s: above zero; infinity counts without limiting.

        Raises:
            StoreError: bad name or rate, or the directory cannot be used.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise StoreError(f"limiter name {name!r} is not a plain file name")
        if not rate_bytes_s > 0:
            raise StoreError(f"limiter {name}: rate must be above zero, got {rate_bytes_s}")
        path = Path(directory) / f"{name}.limit"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _StateFile(path)
        except OSError as error:
            raise StoreError(f"limiter {name}: {path}: {error.strerror}") from error
        return cls(rate_bytes_s, path, clock or MonotonicClock(), _file=file)

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return not math.isinf(self.rate_bytes_s)

    def pace_blocks(self, block_bytes: int, most: int) -> int:
        """Blocks to ask for at once: ``PACE_S`` of NIC time, within 1 .. ``most``."""
        if not self.limited:
            return most
        return max(1, min(most, int(self.rate_bytes_s * PACE_S / block_bytes)))

    def reserve(self, nbytes: int, deadline: float) -> float | None:
        """Book ``nbytes``; returns when they will have passed the NIC.

        Does not wait for that moment: a caller overlaps its I/O with it and then calls
        ``wait_until``. None, with nothing booked, when they would pass after ``deadline``.

        Raises:
            StoreError: the state file cannot be used any more.
        """
        if not self._lock.acquire(timeout=remaining_s(deadline, self._clock.now())):
            return None
        try:
            if self._path is None:
                return self._grant_own(nbytes, deadline)
            return self._grant_shared(nbytes, deadline)
        except OSError as error:
            raise StoreError(f"limiter {self._path}: {error.strerror}") from error
        finally:
            self._lock.release()

    def wait_until(self, moment_s: float) -> None:
        """Return when the clock has reached ``moment_s``."""
        if (left_s := moment_s - self._clock.now()) > 0:
            self._clock.sleep(left_s)

    def acquire(self, nbytes: int, deadline: float) -> bool:
        """Wait until ``nbytes`` have passed the NIC.

        Returns:
            False, at once and with nothing booked, when that cannot be by ``deadline``.
        """
        finish = self.reserve(nbytes, deadline)
        if finish is None:
            return False
        self.wait_until(finish)
        return True

    def state(self, deadline: float = math.inf) -> ClockState:
        """The shared totals (of this process only for ``unlimited``).

        Raises:
            TimeoutError: the lock was not free before ``deadline``.
        """
        with self._lock:
            if self._path is None:
                return self._own
            file = self._open()
            if not file.lock(self._clock, deadline):
                raise TimeoutError(f"limiter {self._path} is locked")
            try:
                return file.load()
            finally:
                file.unlock()

    def close(self) -> None:
        """Let go of the state file (it stays for the others)."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _grant_own(self, nbytes: int, deadline: float) -> float | None:
        after = grant(self._own, self._clock.now(), nbytes, self.rate_bytes_s, deadline)
        if after is None:
            return None
        self._own = after
        return after.next_free_s

    def _grant_shared(self, nbytes: int, deadline: float) -> float | None:
        file = self._open()
        if not file.lock(self._clock, deadline):
            return None
        try:
            now = self._clock.now()
            after = grant(file.load(), now, nbytes, self.rate_bytes_s, deadline)
            if after is None:
                return None
            file.save(after)
            return after.next_free_s
        finally:
            file.unlock()

    def _open(self) -> _StateFile:
        # A forked child shares its parent's open file, and so would share its lock.
        if self._file is None or self._file.pid != os.getpid():
            assert self._path is not None
            self._file = _StateFile(self._path)
        return self._file
