"""Words the storage room speaks: block names, outcomes, errors."""

from __future__ import annotations

import enum
import errno
from typing import Final

import msgspec

NO_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The disk or its quota is full, so that removing files makes room."""
_FULL: Final = NO_DISK | {errno.EFBIG}
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class BlockId(msgspec.Struct, frozen=True, gc=False):
    """Name of a stored block inside its root's namespace. Cheap: a listing makes one a block.

    Attributes:
        key: chain hash of all tokens up to the block's end (32 bytes).
        parent: key of the block before it; the root's digest for a first block (32 bytes).
    """

    key: bytes
    parent: bytes


class ReadStatus(enum.Enum):
    """Outcome of reading one block. Only ``OK`` leaves anything meaningful in the slot."""

    OK = "ok"
    MISSING = "missing"
    """No such block is stored."""
    CORRUPT = "corrupt"
    """The file was not what its name promises; it has been removed."""
    FAILED = "failed"
    """The operating system reported an error; the file is left alone."""
    EXPIRED = "expired"
    """Not started, because it could not end before the deadline."""


class WriteStatus(enum.Enum):
    """Outcome of writing one block."""

    PUBLISHED = "published"
    """Visible to everyone, and durable if the store was opened with ``fsync``."""
    PRESENT = "present"
    """Somebody had published it already."""
    FULL = "full"
    """No room: capacity, disk, quota or file size limit."""
    READ_ONLY = "read_only"
    """The file system or its permissions do not let us write."""
    FAILED = "failed"
    """Any other error of the operating system, such as a directory that vanished."""
    EXPIRED = "expired"
    """Not started, because it could not end before the deadline."""


def status_of(code: int) -> WriteStatus:
    """What an errno means to whoever wanted the block stored."""
    if code in _FULL:
        return WriteStatus.FULL
    if code in _READ_ONLY:
        return WriteStatus.READ_ONLY
    return WriteStatus.EXPIRED if code == errno.ETIMEDOUT else WriteStatus.FAILED


class StoreError(RuntimeError):
    """The store cannot be used as asked; the message says what to change."""


class StoreClosedError(StoreError):
    """A call came after ``close()``."""


class UnsupportedIoError(StoreError):
    """The I/O method or O_DIRECT was demanded and does not work on this directory."""
