"""What the tests of the store share."""

import hashlib
import time
from pathlib import Path

from dualpath.blocks import BlockLayout
from dualpath.storage import BlockId
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.paths import block_path

LAYOUT = BlockLayout(num_layers=2, block_tokens=16, engine_block_tokens=16, token_layer_bytes=250)
"""8,000 bytes of KV in slots of 8,192: there is padding."""
ROOT = hashlib.sha256(b"root").digest()


def soon() -> float:
    """A deadline that only a hang misses."""
    return time.monotonic() + 20.0


def chain(count: int, salt: str = "", root: bytes = ROOT) -> list[BlockId]:
    """A chain of blocks below ``root``."""
    blocks: list[BlockId] = []
    parent = root
    for index in range(count):
        key = hashlib.sha256(f"{salt}/{index}".encode()).digest()
        blocks.append(BlockId(key, parent))
        parent = key
    return blocks


def content(block: BlockId, size_bytes: int) -> bytes:
    """Bytes that follow from the key, so that anybody can check them."""
    return hashlib.shake_128(block.key).digest(size_bytes)


def filled(blocks: list[BlockId], layout: BlockLayout = LAYOUT) -> list[memoryview]:
    """Slots with each block's content."""
    slots = empty(len(blocks), layout)
    for block, slot in zip(blocks, slots, strict=True):
        slot[:] = content(block, layout.slot_bytes)
    return slots


def empty(count: int, layout: BlockLayout = LAYOUT) -> list[memoryview]:
    """Zeroed slots."""
    return aligned_buffers(count, layout.slot_bytes)


def path_of(store: Path, block: BlockId, root: bytes = ROOT) -> Path:
    """A block's file."""
    return block_path(store, root, block)


def leftovers(store: Path) -> list[Path]:
    """Unpublished files in the store."""
    return [path for path in (store / "tmp").glob("*/*") if path.is_file() and path.name != "hold"]
