"""Where things lie in a store directory.

::

    <store>/blocks/<root hex>/<first key byte hex>/<key hex>.<parent hex>
    <store>/tmp/<writer>/<number>       unpublished blocks of one running writer
    <store>/tmp/<writer>.lock           held with flock for the writer's life
    <store>/epoch.json                  cluster state, see ``epoch``

A block's file name carries key and parent, so a directory listing alone rebuilds the index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dualpath.blocks import KEY_BYTES
from dualpath.storage.types import BlockId

BLOCKS_DIR: Final = "blocks"
TMP_DIR: Final = "tmp"
_HEX: Final = 2 * KEY_BYTES
_NAME_LENGTH: Final = 2 * _HEX + 1


def block_dir(store: Path, root: bytes, key: bytes) -> Path:
    """Folder that holds the block named ``key``."""
    return store / BLOCKS_DIR / root.hex() / key[:1].hex()


def block_name(block: BlockId) -> str:
    """File name of a block."""
    return f"{block.key.hex()}.{block.parent.hex()}"


def block_path(store: Path, root: bytes, block: BlockId) -> Path:
    """Full path of a block's file."""
    return block_dir(store, root, block.key) / block_name(block)


def parse_name(name: str) -> BlockId | None:
    """The block that ``name`` names, or None when it is no block's name."""
    if len(name) != _NAME_LENGTH or name[_HEX] != ".":
        return None
    key, parent = _digest(name[:_HEX]), _digest(name[_HEX + 1 :])
    return None if key is None or parent is None else BlockId(key, parent)


def scan_entries(
    store: str | Path, root: bytes | None = None
) -> Iterator[tuple[bytes, BlockId, os.DirEntry[str]]]:
    """Every block file with its directory entry; see ``scan_blocks``."""
    for root_entry in _entries(f"{store}/{BLOCKS_DIR}"):
        digest = _digest(root_entry.name)
        if digest is None or (root is not None and digest != root):
            continue
        for byte_entry in _entries(root_entry.path):
            for entry in _entries(byte_entry.path):
                block = parse_name(entry.name)
                # A file in the wrong folder would never be found by a reader.
                if block is not None and entry.name[:2] == byte_entry.name:
                    yield digest, block, entry


def scan_blocks(store: str | Path, root: bytes | None = None) -> Iterator[tuple[bytes, BlockId]]:
    """Names of all published blocks, by listing directories only: no file is opened.

    Blocks published or removed meanwhile may or may not appear. A store that does not exist yet
    is empty.

    Args:
        store: the store's directory.
        root: only this namespace; all when None.

    Raises:
        OSError: a directory exists and cannot be listed.
    """
    for digest, block, _entry in scan_entries(store, root):
        yield digest, block


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        listing = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # removed since its parent was listed, or a stray file
    with listing:
        yield from listing


def _digest(text: str) -> bytes | None:
    if len(text) != _HEX or (not text.islower() and not text.isdigit()):
        return None  # fromhex would also take capitals, which name another file
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == KEY_BYTES else None
