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
_TAIL_BYTES: Final = 1 << 16


class DecisionFile:
    """Appends lines in a thread, so that a slow disk does not hold up requests.

    A line that cannot be written ends the log: with a gap it could not be replayed. It starts
    again with the next scheduler (a change of mode, or a new front). Serving goes on in any case.

    Attributes:
        lost: lines that were not written.
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
        self.lost = 0
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
        self._lines.append(line)
        self._news.set()

    async def run(self) -> None:
        """Write what is queued, again and again, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.to_thread(self._append)

    def close(self) -> None:
        """Write what is left."""
        self._append()
        with self._writing:
            os.close(self._file)

    def _append(self) -> None:
        with self._writing:
            taken = [self._lines.popleft() for _ in range(len(self._lines))]
            while taken and self._broken:
                if starts(taken[0]):
                    self._broken = False
                else:
                    self.lost += 1
                    taken.pop(0)
            if not taken:
                return
            data = "".join(f"{line}\n" for line in taken).encode()
            try:
                _write_at(self._file, data, self._end)
                self._end += len(data)
            except OSError as error:
                self._broken = True
                self.lost += len(taken)
                logger.error(
                    "%s: %s; no more decisions are logged until the next start or change of mode",
                    self._path,
                    error.strerror,
                )
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
