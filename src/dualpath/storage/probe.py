"""Which I/O method and which open flags work on a directory: found out by trying."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final

from dualpath.storage.blockio import BlockIO, Direction, IoOp
from dualpath.storage.io_nixl import NixlPosixIO
from dualpath.storage.io_threads import ThreadPoolIO
from dualpath.storage.io_usrbio import UsrbioIO
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.nixl_module import find_nixl
from dualpath.storage.tempdir import TempArea
from dualpath.storage.types import StoreError, UnsupportedIoError
from dualpath.storage.usrbio import load_usrbio

log = logging.getLogger(__name__)

_TEST_BYTES: Final = 4096
_TEST_DEADLINE_S: Final = 30.0


def choose_direct(direct: str, temp: TempArea | None) -> bool:
    """Whether to open files with O_DIRECT.

    Args:
        direct: ``on``, ``off`` or ``auto`` (on where it works).
        temp: where to try; without one (a read-only store) ``auto`` means off.

    Raises:
        UnsupportedIoError: ``on``, and this file system does not take it.
        StoreError: another word.
    """
    if direct not in ("auto", "on", "off"):
        raise StoreError(f"direct must be 'auto', 'on' or 'off', got {direct!r}")
    if direct == "off" or (temp is None and direct == "auto"):
        return False
    if temp is None:
        return True
    with contextlib.closing(ThreadPoolIO(1)) as io:
        failure = self_test(io, temp, os.O_DIRECT)
    if failure and direct == "on":
        raise UnsupportedIoError(f"direct = 'on', but O_DIRECT fails in {temp.path}: {failure}")
    if failure:
        log.info("O_DIRECT does not work in %s (%s): reading through the page cache",
                 temp.path, failure)  # fmt: skip
    return not failure


def choose_io(io: str, temp: TempArea | None, direct: bool, batch_blocks: int) -> BlockIO:
    """An I/O method that has just moved bytes in this directory.

    ``auto`` takes NIXL where it is installed, works, and files are opened with O_DIRECT; threads
    otherwise. Through the page cache the kernel does Linux AIO inside the submission, one block
    after the other, so there threads are faster (docs/storage.md has the figures).

    Raises:
        UnsupportedIoError: ``nixl``, and it does not work here.
        StoreError: an unknown word.
    """
    if io not in ("auto", "nixl", "threads"):
        raise StoreError(f"io must be 'auto', 'nixl', 'threads' or 'usrbio', got {io!r}")
    if io == "nixl" or (io == "auto" and direct):
        method = _try_nixl(temp, direct, batch_blocks)
        if isinstance(method, NixlPosixIO):
            return method
        if io == "nixl":
            raise UnsupportedIoError(f"io = 'nixl': {method}")
        log.info("NIXL is not used for storage (%s): using threads", method)
    return ThreadPoolIO()


def open_usrbio(
    library: str, store: Path, temp: TempArea | None, batch_blocks: int, block_bytes: int
) -> UsrbioIO:
    """USRBIO, which has just moved bytes in this directory.

    Args:
        library: file name or path of 3FS's client library.
        store: an existing directory below a 3FS mount.
        block_bytes: header and slot.

    Raises:
        UnsupportedIoError: no library, no 3FS, or it does not work.
    """
    usrbio = load_usrbio(library)
    method = UsrbioIO(usrbio, usrbio.mount_of(store), batch_blocks, block_bytes)
    failure = self_test(method, temp, 0) if temp is not None else ""
    if failure:
        method.close()
        raise UnsupportedIoError(f"io = 'usrbio': self-test in {store} failed: {failure}")
    return method


def _try_nixl(temp: TempArea | None, direct: bool, batch_blocks: int) -> NixlPosixIO | str:
    nixl = find_nixl()
    if nixl is None:
        return "no NIXL package is installed"
    try:
        method = NixlPosixIO(nixl, batch_blocks)
    except UnsupportedIoError as error:
        return str(error)
    if temp is not None:
        failure = self_test(method, temp, os.O_DIRECT if direct else 0)
        if not failure and method.lane_errors:
            failure = "it reported an error"
        if failure:
            method.close()
            return f"self-test failed: {failure}"
    return method


def self_test(io: BlockIO, temp: TempArea, flags: int) -> str:
    """Write and read one small file; returns what went wrong, empty when nothing did."""
    path = temp.new_path()
    out_header, out_slot, in_header, in_slot = aligned_buffers(4, _TEST_BYTES)
    out_header[:] = os.urandom(_TEST_BYTES)
    out_slot[:] = os.urandom(_TEST_BYTES)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        return error.strerror or str(error)
    try:
        deadline = time.monotonic() + _TEST_DEADLINE_S
        written = io.transfer(Direction.WRITE, [IoOp(fd, out_header, out_slot)], deadline)
        read = io.transfer(Direction.READ, [IoOp(fd, in_header, in_slot)], deadline)
    finally:
        os.close(fd)
        path.unlink()
    for code in (*written, *read):
        if code:
            return os.strerror(code)
    if in_header != out_header or in_slot != out_slot:
        return "what was read is not what was written"
    return ""
