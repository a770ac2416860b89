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
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dualpath.blocks import KEY_BYTES
from dualpath.storage.types import BlockId

BLOCKS_DIR: Final = "blocks"
TMP_DIR: Final = "tmp"
_HEX: Final = 2 * KEY_BYTES
# Capitals, which ``bytes.fromhex`` would take too, name another file.
_DIGEST: Final = re.compile(rf"[0-9a-f]{{{_HEX}}}")
_NAME: Final = re.compile(rf"{_DIGEST.pattern}\.{_DIGEST.pattern}")


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
    return _block_of(name) if _NAME.fullmatch(name) else None


def _block_of(name: str) -> BlockId:
    return BlockId(bytes.fromhex(name[:_HEX]), bytes.fromhex(name[_HEX + 1 :]))


def scan_files(
    store: str | Path, root: bytes | None = None
) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """Directory entries of all block files with their root; see ``scan_blocks``.

    An entry's ``stat`` works until the next one is taken; its ``path`` is only the name.
    """
    is_name = _NAME.fullmatch
    for root_entry in _entries(f"{store}/{BLOCKS_DIR}"):
        digest = parse_digest(root_entry.name)
        if digest is None or (root is not None and digest != root):
            continue
        for byte_entry in _entries(root_entry.path):
            folder = byte_entry.name
            for entry in _entries_below(byte_entry.path):
                name = entry.name
                # A file in the wrong folder would never be found by a reader.
                if name[:2] == folder and is_name(name):
                    yield digest, entry


def scan_entries(
    store: str | Path, root: bytes | None = None
) -> Iterator[tuple[bytes, BlockId, os.DirEntry[str]]]:
    """``scan_files`` with the blocks' names."""
    for digest, entry in scan_files(store, root):
        yield digest, _block_of(entry.name), entry


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


def _entries_below(path: str) -> Iterator[os.DirEntry[str]]:
    """The same by a handle: looking at an entry does not walk the whole path again."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        with os.scandir(folder) as listing:
            yield from listing
    finally:
        os.close(folder)


def parse_digest(text: str) -> bytes | None:
    """The digest that a hexadecimal name stands for, or None."""
    return bytes.fromhex(text) if _DIGEST.fullmatch(text) else None
