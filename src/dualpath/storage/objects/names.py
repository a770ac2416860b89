"""What objects are called.

::

    <prefix>/blocks/<root hex>/<first key byte hex>/<key hex>.<parent hex>     one Full Block
    <prefix>/epoch.json
    <prefix>/capacity

As in a directory, a block's name carries key and parent: a listing alone rebuilds the index.
"""

from __future__ import annotations

from typing import Final

from dualpath.storage.paths import BLOCKS_DIR, block_name, parse_digest, parse_name
from dualpath.storage.types import BlockId

EPOCH_OBJECT: Final = "epoch.json"
CAPACITY_OBJECT: Final = "capacity"
PROBE_FOLDER: Final = "probe"


def block_folder(root: bytes, key: bytes) -> str:
    """What holds the block called ``key``."""
    return f"{BLOCKS_DIR}/{root.hex()}/{key[:1].hex()}"


def block_object(root: bytes, block: BlockId) -> str:
    """Name of a block's object."""
    return f"{block_folder(root, block.key)}/{block_name(block)}"


def root_folder(root: bytes | None) -> str:
    """What holds all blocks, or those of one namespace."""
    return BLOCKS_DIR if root is None else f"{BLOCKS_DIR}/{root.hex()}"


def parse_object(name: str) -> tuple[bytes, BlockId] | None:
    """``(root, block)``, or None when it is no block's name."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != BLOCKS_DIR:
        return None
    root, block = parse_digest(parts[1]), parse_name(parts[3])
    if root is None or block is None or parts[3][:2] != parts[2]:
        return None
    return root, block
