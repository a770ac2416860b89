"""Page-aligned memory for headers, and the caller's slots."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from dualpath.blocks import ALIGNMENT_BYTES, KEY_BYTES
from dualpath.storage.types import BlockId


def aligned_buffers(count: int, size_bytes: int) -> list[memoryview]:
    """``count`` zeroed, page-aligned, writable buffers, freed when the last view goes."""
    region = memoryview(mmap.mmap(-1, count * size_bytes))
    return [region[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]


def address_of(view: memoryview) -> int:
    """Address of a view's first byte.

    Raises:
        TypeError: the view is read-only or not contiguous.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def check_slot(view: memoryview, slot_bytes: int) -> memoryview:
    """The view as plain bytes, if it is a usable slot.

    Raises:
        ValueError: not exactly ``slot_bytes`` writable, contiguous, page-aligned bytes.
    """
    if view.nbytes != slot_bytes:
        raise ValueError(f"a slot is {slot_bytes} bytes, this view is {view.nbytes}")
    if view.readonly or not view.c_contiguous:
        raise ValueError("a slot must be writable and contiguous")
    plain = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if address_of(plain) % ALIGNMENT_BYTES:
        raise ValueError(f"a slot must start on a {ALIGNMENT_BYTES}-byte boundary")
    return plain


def check_call(
    root: bytes, blocks: Sequence[BlockId], slots: Sequence[memoryview], slot_bytes: int
) -> list[memoryview]:
    """The slots as plain bytes, if blocks and slots fit each other.

    Raises:
        ValueError: the counts differ, a digest has a wrong length, or see ``check_slot``.
    """
    if len(blocks) != len(slots):
        raise ValueError(f"{len(blocks)} blocks but {len(slots)} slots")
    for digest in (root, *(part for block in blocks for part in (block.key, block.parent))):
        if len(digest) != KEY_BYTES:
            raise ValueError(f"a root, key or parent is {KEY_BYTES} bytes, not {len(digest)}")
    return [check_slot(slot, slot_bytes) for slot in slots]
