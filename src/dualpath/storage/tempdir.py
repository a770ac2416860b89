"""Where a writer keeps blocks that are not published yet.

Every open store has a folder of its own under ``tmp/`` and holds an flock on a file beside it.
Whoever opens the store next removes the folders whose lock is free: their writer is dead, whatever
became of its process id, and on whichever host it ran (as far as the file system's locks reach).
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

UNLOCKED_MAX_AGE_S: Final = 24 * 3600.0
"""Age at which a folder without a lock, or on a file system without locks, counts as abandoned."""
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_LOCK_SUFFIX: Final = ".lock"
_HOST_MARK: Final = "@"


class TempArea:
    """A folder for unpublished files, on the same file system as the blocks. Thread safe."""

    def __init__(self, root: Path, name: str, lock_fd: int) -> None:
        self.path = root / name
        self._lock_path = root / f"{name}{_LOCK_SUFFIX}"
        self._lock_fd = lock_fd
        self._serial = itertools.count()

    @classmethod
    def create(cls, root: Path, *, locks_are_local: bool = False) -> TempArea:
        """Make one under ``root``, after removing what dead writers left there.

        Args:
            locks_are_local: file locks here do not reach other hosts. The folder then bears this
                host's name, and other hosts let it be.

        Raises:
            OSError: the folder cannot be made.
        """
        root.mkdir(exist_ok=True)
        remove_abandoned(root)
        while True:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            if locks_are_local:
                name += f"{_HOST_MARK}{os.uname().nodename}"
            fd = _open_locked(root / f"{name}{_LOCK_SUFFIX}")
            if fd is not None:
                break
        area = cls(root, name, fd)
        try:
            area.path.mkdir()
        except OSError:
            os.close(fd)
            raise
        return area

    def new_path(self) -> Path:
        """A path that nobody else uses."""
        return self.path / str(next(self._serial))

    def close(self) -> None:
        """Remove the folder and whatever is in it."""
        _remove(self.path, self._lock_path)
        os.close(self._lock_fd)


def remove_abandoned(root: Path) -> int:
    """Remove the folders of dead writers; returns how many."""
    removed = sum(
        _reap(folder, root / f"{folder.name}{_LOCK_SUFFIX}") for folder in list(_folders(root))
    )
    if removed:
        log.info("removed unpublished blocks of %d dead writers in %s", removed, root)
    return removed


def _folders(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        # A lock without its folder: its writer died, or is about to make it.
        if path.name.endswith(_LOCK_SUFFIX):
            folder = path.with_name(path.name.removesuffix(_LOCK_SUFFIX))
            if not folder.exists():
                yield folder
        elif path.is_dir():
            yield path


def foreign_writers(root: Path) -> list[Path]:
    """Folders of writers on other hosts whose locks do not reach us, so that nobody here can tell
    whether they live."""
    return [folder for folder in _folders(root) if _is_foreign(folder)]


def _is_foreign(folder: Path) -> bool:
    _, mark, host = folder.name.partition(_HOST_MARK)
    return bool(mark) and host != os.uname().nodename


def _reap(folder: Path, lock_path: Path) -> bool:
    """Remove a folder whose writer is dead; returns whether it was."""
    if _is_foreign(folder):
        return False
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _is_old(folder) and _remove(folder, lock_path)
    except OSError as error:
        log.warning("cannot look at %s: %s", lock_path, error)
        return False
    # The lock is kept until all is gone: a writer that is just starting then sees that its lock
    # file was taken away, and makes another.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _remove(folder, lock_path)
    except OSError as error:
        return error.errno in _NO_LOCKS and _is_old(folder) and _remove(folder, lock_path)
    finally:
        os.close(fd)


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > UNLOCKED_MAX_AGE_S
    except FileNotFoundError:
        return False


def _open_locked(path: Path) -> int | None:
    """A new lock file, locked; None when a cleaner removed it before we had the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
            raise
        log.warning("%s: no file locks here, dead writers are recognised by age only", path)
        return fd
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None
    return fd


def _remove(folder: Path, lock_path: Path) -> bool:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove %s: %s", folder, error)
        return False
    lock_path.unlink(missing_ok=True)
    return True
