"""The decision log's file. What stands in it can always be replayed up to its end."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
from collections import deque
from typing import Final

from dualpath.config import ConfigError
from dualpath.scheduler.decision_log import starts

logger = logging.getLogger(__name__)
_ENDED: Final = "no more decisions are logged until the next start or change of mode"
_TAIL_BYTES: Final = 1 << 16
_CLOSE_S: Final = 5.0
MOST_QUEUED: Final = 1 << 16
"""Lines that wait for a disk that hangs; more are lost."""


class DecisionFile:
    """Appends lines in a thread, so that a slow disk does not hold up requests.

    A line that cannot be written ends the log: with a gap it could not be replayed. It starts
    again with the next scheduler (a change of mode, or a new front). Serving goes on in any case.
    """

    def __init__(self, path: str) -> None:
        """Open ``path`` for appending; a last line that a crash cut off is removed.

        Raises:
            ConfigError: it cannot be opened, or another front writes to it.
        """
        self._path = path
        self._lines: deque[str] = deque()
        self._news = asyncio.Event()
        self._writing = threading.Lock()
        self._broken = False
        self._unwritten = 0
        self._full = False
        self._refused = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = _end_of_last_line(self._file)
            os.ftruncate(self._file, self._end)
        except BlockingIOError:
            raise ConfigError(f"scheduler.decision_log: another front writes to {path}") from None
        except OSError as error:
            raise ConfigError(
                f"scheduler.decision_log: {path} cannot be written: {error.strerror}"
            ) from None

    def write(self, line: str) -> None:
        """Queue a line (without its end). Event loop only; never waits or raises."""
        room = len(self._lines) < MOST_QUEUED
        if not room and not self._full:
            logger.error("%s: the disk does not keep up; %s", self._path, _ENDED)
        self._full = not room or (self._full and not starts(line))
        if self._full:
            self._refused += 1
            return
        self._lines.append(line)
        self._news.set()

    @property
    def lost(self) -> int:
        """Lines that were not written."""
        return self._unwritten + self._refused

    async def run(self) -> None:
        """Write what is queued, again and again, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.to_thread(self._append)

    async def close(self) -> None:
        """Write what is left; a disk that hangs is given up."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.to_thread(self._append)
        except TimeoutError:
            logger.error("%s: its end could not be written within %g s", self._path, _CLOSE_S)
            return  # the thread still uses the file
        os.close(self._file)

    def _append(self) -> None:
        with self._writing:
            taken = [self._lines.popleft() for _ in range(len(self._lines))]
            if self._broken:
                start = next((n for n, line in enumerate(taken) if starts(line)), len(taken))
                self._broken = start == len(taken)
                self._unwritten += start
                taken = taken[start:]
            if not taken:
                return
            data = "".join(f"{line}\n" for line in taken).encode()
            try:
                _write_at(self._file, data, self._end)
                self._end += len(data)
            except OSError as error:
                self._broken = True
                self._unwritten += len(taken)
                logger.error("%s: %s; %s", self._path, error.strerror, _ENDED)
                self._cut()

    def _cut(self) -> None:
        """Leave no part of a line behind; the next write would overwrite it anyway."""
        try:
            os.ftruncate(self._file, self._end)
        except OSError as error:
            logger.error("%s: its last line may be incomplete: %s", self._path, error.strerror)


def _write_at(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _end_of_last_line(file: int) -> int:
    """Length of the file up to and with its last newline."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - _TAIL_BYTES)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
