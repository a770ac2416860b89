"""3FS's user-space interface (USRBIO), by the C ABI of its client library.

Bound at run time, by cffi: nothing of 3FS is needed to build or install. The declarations below
are that ABI; the meaning of each call is described in 3FS's own documentation of USRBIO.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from dualpath.storage.types import UnsupportedIoError

_ABI: Final = """
    struct hf3fs_iov {
        uint8_t *base; void *handle; char id[16]; char mount_point[256];
        size_t size; size_t block_size; int numa;
    };
    struct hf3fs_ior {
        struct hf3fs_iov iov; void *handle; char mount_point[256];
        _Bool for_read; int io_depth; int priority; int timeout; uint64_t flags;
    };
    struct hf3fs_cqe { int32_t index; int32_t reserved; int64_t result; const void *userdata; };
    struct timespec { long tv_sec; long tv_nsec; };
    int hf3fs_extract_mount_point(char *mount_point, int size, const char *path);
    int hf3fs_iovcreate(struct hf3fs_iov *, const char *mount_point, size_t size,
                        size_t block_size, int numa);
    void hf3fs_iovdestroy(struct hf3fs_iov *);
    int hf3fs_iorcreate4(struct hf3fs_ior *, const char *mount_point, int entries,
                         _Bool for_read, int io_depth, int timeout, int numa, uint64_t flags);
    void hf3fs_iordestroy(struct hf3fs_ior *);
    int hf3fs_reg_fd(int fd, uint64_t flags);
    void hf3fs_dereg_fd(int fd);
    int hf3fs_prep_io(const struct hf3fs_ior *, const struct hf3fs_iov *, _Bool read, void *ptr,
                      int fd, size_t off, uint64_t len, const void *userdata);
    int hf3fs_submit_ios(const struct hf3fs_ior *);
    int hf3fs_wait_for_ios(const struct hf3fs_ior *, struct hf3fs_cqe *, int cqec,
                           int min_results, const struct timespec *abs_timeout);
"""
_ANY_NODE: Final = -1
_FORBID_HOLES: Final = 2
"""Ring flag: a part of a file that was never written is an error, not zeros."""
_PATH_BYTES: Final = 256
_LARGE_IOV_BYTES: Final = 1 << 30
"""Larger memory is registered with the network in pieces of about this size."""


class Iov:
    """Memory shared with 3FS's daemon: the only memory USRBIO reads into and writes from.

    Attributes:
        address, size_bytes: where it is.
    """

    def __init__(self, library: Usrbio, mount: str, size_bytes: int, piece_bytes: int) -> None:
        """Use ``Usrbio.memory``."""
        self._library = library
        self.c_iov = library.ffi.new("struct hf3fs_iov *")
        code = library.lib.hf3fs_iovcreate(
            self.c_iov, mount.encode(), size_bytes, piece_bytes, _ANY_NODE
        )
        if code:
            raise OSError(-code, f"hf3fs_iovcreate of {size_bytes} bytes: {os.strerror(-code)}")
        self.address = int(library.ffi.cast("uintptr_t", self.c_iov.base))
        self.size_bytes = size_bytes

    def view(self) -> memoryview:
        """The memory; it must not be used after ``close``."""
        return memoryview(self._library.ffi.buffer(self.c_iov.base, self.size_bytes))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether a range lies inside."""
        return self.address <= address and address + nbytes <= self.address + self.size_bytes

    def close(self) -> None:
        """Give the memory back. Nothing of it may be under I/O."""
        self._library.forget(self)
        self._library.lib.hf3fs_iovdestroy(self.c_iov)


class Ring:
    """A queue of I/O in one direction. One thread at a time."""

    def __init__(self, library: Usrbio, mount: str, entries: int, for_read: bool) -> None:
        """Use ``Usrbio.ring``."""
        self._library = library
        self._for_read = for_read
        self._c_ring = library.ffi.new("struct hf3fs_ior *")
        self._results = library.ffi.new("struct hf3fs_cqe[]", entries)
        self._entries = entries
        code = library.lib.hf3fs_iorcreate4(
            self._c_ring, mount.encode(), entries, for_read, 0, 0, _ANY_NODE,
            _FORBID_HOLES if for_read else 0,
        )  # fmt: skip
        if code:
            raise OSError(-code, f"hf3fs_iorcreate4: {os.strerror(-code)}")

    def prepare(
        self, iov: Iov, address: int, fd: int, offset: int, nbytes: int, number: int
    ) -> int:
        """Queue one I/O between ``[address, address + nbytes)`` of ``iov`` and a registered file;
        ``number`` comes back with its result. Returns an errno: 0, EAGAIN when the ring is full,
        or what is wrong."""
        ffi = self._library.ffi
        code: int = self._library.lib.hf3fs_prep_io(
            self._c_ring, iov.c_iov, self._for_read, ffi.cast("void *", address), fd, offset,
            nbytes, ffi.cast("void *", number),
        )  # fmt: skip
        return max(0, -code)

    def submit(self) -> int:
        """Tell the daemon that there is something; returns an errno."""
        code: int = self._library.lib.hf3fs_submit_ios(self._c_ring)
        return max(0, -code)

    def wait(self, least: int, timeout_s: float) -> list[tuple[int, int]]:
        """``(number, bytes moved or negative errno)`` of what has ended: at least ``least`` of
        them, unless ``timeout_s`` passes first.

        Raises:
            OSError: the ring cannot be used any more.
        """
        ffi = self._library.ffi
        # The ABI wants a moment of the wall clock, even though that may be set meanwhile.
        end_s = time.time() + timeout_s
        until = ffi.new("struct timespec *", (int(end_s), int(end_s % 1 * 1e9)))
        found = self._library.lib.hf3fs_wait_for_ios(
            self._c_ring, self._results, self._entries, min(least, self._entries), until
        )
        if found < 0:
            raise OSError(-found, f"hf3fs_wait_for_ios: {os.strerror(-found)}")
        return [
            (int(ffi.cast("uintptr_t", result.userdata)), int(result.result))
            for result in self._results[0:found]
        ]

    def close(self) -> None:
        """Give the ring back. Nothing of it may be under way."""
        self._library.lib.hf3fs_iordestroy(self._c_ring)


class Usrbio:
    """The client library. Any thread may call; a ring belongs to one at a time.

    Raises:
        UnsupportedIoError: it cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        try:
            self.ffi: Any = importlib.import_module("cffi").FFI()
        except ImportError as error:
            raise UnsupportedIoError(
                f"io = 'usrbio' needs cffi ({error}): pip install 'dualpath[usrbio]'"
            ) from None
        self.ffi.cdef(_ABI)
        try:
            self.lib: Any = self.ffi.dlopen(name)
        except OSError as error:
            raise UnsupportedIoError(
                f"io = 'usrbio': {error}; see storage.usrbio_library"
            ) from None
        self._lock = threading.Lock()
        self._iovs: list[Iov] = []

    def mount_of(self, path: Path) -> str:
        """The 3FS mount point above ``path``, which must exist.

        Raises:
            UnsupportedIoError: it lies on no 3FS.
        """
        buffer = self.ffi.new("char[]", _PATH_BYTES)
        length = self.lib.hf3fs_extract_mount_point(buffer, _PATH_BYTES, os.fsencode(path))
        if not 0 < length <= _PATH_BYTES:
            raise UnsupportedIoError(f"io = 'usrbio': {path} is not below a 3FS mount")
        text: bytes = self.ffi.string(buffer)
        return os.fsdecode(text)

    def memory(self, mount: str, size_bytes: int, slot_bytes: int) -> Iov:
        """Shared memory, whose slots of ``slot_bytes`` USRBIO reads and writes without a copy.

        Raises:
            OSError: there is none.
        """
        piece = 0
        if size_bytes > _LARGE_IOV_BYTES:  # no slot may lie across the edge of a piece
            piece = max(1, _LARGE_IOV_BYTES // slot_bytes) * slot_bytes
        iov = Iov(self, mount, size_bytes, piece)
        with self._lock:
            self._iovs.append(iov)
        return iov

    def ring(self, mount: str, entries: int, *, for_read: bool) -> Ring:
        """A new ring.

        Raises:
            OSError: there is none.
        """
        return Ring(self, mount, entries, for_read)

    def iov_of(self, address: int, nbytes: int) -> Iov | None:
        """The shared memory that a range lies in, if any."""
        with self._lock:
            return next((iov for iov in self._iovs if iov.holds(address, nbytes)), None)

    def forget(self, iov: Iov) -> None:
        """``iov`` is about to be given back."""
        with self._lock:
            self._iovs.remove(iov)

    def register(self, fd: int) -> int:
        """Make a file known to USRBIO; returns an errno."""
        code: int = self.lib.hf3fs_reg_fd(fd, 0)
        return max(0, code)

    def deregister(self, fd: int) -> None:
        """Undo ``register``; I/O that is queued already goes on."""
        self.lib.hf3fs_dereg_fd(fd)


@functools.cache
def load_usrbio(name: str) -> Usrbio:
    """The library called ``name``, loaded once: all of a process share its memory.

    Raises:
        UnsupportedIoError: it cannot be loaded.
    """
    return Usrbio(name)
