"""Whether bytes are the block that their name promises."""

from __future__ import annotations

from dualpath.storage.header import HEADER_BYTES, BlockHeader, HeaderError, checksum, decode
from dualpath.storage.types import BlockId


def slot_fault(
    root: bytes, block: BlockId, header: memoryview, slot: memoryview, payload_bytes: int
) -> str:
    """Why a header and the slot behind it are not ``block`` with ``payload_bytes`` of KV; empty
    when they are."""
    found = _decoded(root, block, header)
    if isinstance(found, str):
        return found
    if (found.payload_bytes, found.stored_bytes) != (payload_bytes, slot.nbytes):
        return f"it holds {found.payload_bytes} bytes of KV ({found.fingerprint})"
    return "" if found.checksum == checksum(slot) else "payload checksum is wrong"


def fault_of(data: memoryview, root: bytes, block: BlockId) -> str:
    """The same for a whole stored block of whatever geometry its header gives."""
    found = _decoded(root, block, data[:HEADER_BYTES])
    if isinstance(found, str):
        return found
    if len(data) != HEADER_BYTES + found.stored_bytes:
        return f"it has {len(data)} bytes"
    return "" if found.checksum == checksum(data[HEADER_BYTES:]) else "payload checksum is wrong"


def _decoded(root: bytes, block: BlockId, header: memoryview) -> BlockHeader | str:
    try:
        found = decode(header)
    except HeaderError as error:
        return str(error)
    if (found.root, found.key, found.parent) != (root, block.key, block.parent):
        return "it holds another block"
    return found
