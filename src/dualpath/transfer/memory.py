"""Memory that transfers and storage read and write by address."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final, Self

PAGE_BYTES: Final = mmap.PAGESIZE


class Region:
    """A contiguous range of host memory, page aligned when it is our own.

    ``Region(nbytes)`` maps anonymous zeroed memory. Pages are taken from the system at first
    touch, so a large buffer that is never full costs only what was used, unless ``populate``.
    ``Region.borrowed`` describes memory that somebody else allocated.

    Args:
        nbytes: size; at least 1.
        populate: take all pages now, so that no later access can run out of memory or stall.
        huge_pages: advise the kernel to back it with huge pages, where it can.

    Raises:
        ValueError: ``nbytes`` is below 1.
        OSError: the kernel refuses the mapping.

    Thread safety: immutable after construction except for ``close``.
    """

    __slots__ = ("_keepalive", "_map", "_whole", "address", "device", "nbytes")

    def __init__(self, nbytes: int, *, populate: bool = False, huge_pages: bool = True) -> None:
        if nbytes < 1:
            raise ValueError(f"a region needs at least 1 byte, got {nbytes}")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if populate:
            flags |= mmap.MAP_POPULATE
        self._map: mmap.mmap | None = mmap.mmap(-1, nbytes, flags=flags)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            # Only advice: a kernel built without transparent huge pages answers EINVAL, and the
            # memory is as good as before.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._keepalive: object = None
        self._whole: memoryview | None = memoryview(self._map)
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes: int = nbytes
        self.device: int | None = None

    @classmethod
    def borrowed(
        cls, address: int, nbytes: int, keepalive: object, device: int | None = None
    ) -> Self:
        """Describe ``nbytes`` at ``address``, owned by somebody else.

        Args:
            keepalive: object that owns the memory; referenced until ``close``.
            device: number of the GPU whose memory it is; None for host memory. No view of GPU
                memory may be looked into.

        Raises:
            ValueError: null address or no bytes.
        """
        if address <= 0 or nbytes < 1:
            raise ValueError(f"not a memory range: {nbytes} bytes at {address:#x}")
        region = cls.__new__(cls)
        region._map = None
        region._keepalive = keepalive
        region._whole = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        region.address = address
        region.nbytes = nbytes
        region.device = device
        return region

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._whole is None

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Writable bytes ``offset .. offset + nbytes`` (to the end when None).

        A view of our own memory keeps it mapped, also after ``close``. A view of borrowed memory
        is only as good as its owner: drop it before ``close``.

        Raises:
            ValueError: the range is not inside the region, or the region is closed.
        """
        if self._whole is None:
            raise ValueError("the region is closed")
        length = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise ValueError(
                f"bytes {offset} .. {offset + length} are outside a region of {self.nbytes}"
            )
        return self._whole[offset : offset + length]

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether ``nbytes`` at ``address`` lie inside."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        """Give the memory back; idempotent.

        Memory of our own is unmapped at once when no view of it is left, else with the last
        view. Nothing may be transferring by address any more: addresses do not keep it mapped.
        """
        if self._whole is None:
            return
        self._whole.release()
        self._whole = None
        self._keepalive = None
        if self._map is not None:
            # BufferError: somebody still holds a view. Unmapping under it would be a crash;
            # dropping our reference lets the last view unmap it.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
