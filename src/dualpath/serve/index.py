"""Which blocks are stored: the front's view, fed by the engines.

It may be stale in either direction. A block it does not know is computed again; one that is gone
is found missing by its reader, dropped here, and computed again. Neither gives a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualpath.blocks import BlockTrie
from dualpath.config import StorageConfig
from dualpath.control.messages import Dropped, Published
from dualpath.storage import StoreError, scan_stored


class BlockIndex:
    """A trie per namespace. Belongs to the event loop."""

    def __init__(self) -> None:
        self._tries: dict[bytes, BlockTrie] = {}

    def __len__(self) -> int:
        return sum(len(trie) for trie in self._tries.values())

    def published(self, message: Published) -> None:
        """Blocks that exist now."""
        trie = self._tries.setdefault(message.root, BlockTrie())
        for block in message.blocks:
            trie.insert(block.key, block.parent)

    def dropped(self, message: Dropped) -> int:
        """Blocks that are gone; returns how many of them were known."""
        trie = self._tries.get(message.root)
        if trie is None:
            return 0
        return sum(trie.remove(key) for key in message.keys)

    def add(self, entries: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Blocks as ``(root, key, parent)``."""
        for root, key, parent in entries:
            self._tries.setdefault(root, BlockTrie()).insert(key, parent)

    def hit_blocks(self, root: bytes, keys: Sequence[bytes], most: int) -> int:
        """Leading ``keys`` that are stored under ``root``, at most ``most``."""
        trie = self._tries.get(root)
        return 0 if trie is None else trie.longest_prefix(keys[:most])

    def clear(self) -> None:
        """Forget everything (after a weight update nothing is reachable any more)."""
        self._tries.clear()

    def check_integrity(self) -> None:
        """Recount every trie.

        Raises:
            AssertionError: a count is off.
        """
        for trie in self._tries.values():
            trie.check_integrity()


def scan_store(storage: StorageConfig) -> list[tuple[bytes, bytes, bytes]]:
    """``(root, key, parent)`` of every block in the store. Blocking: run in a thread.

    Raises:
        StoreError: the store cannot be used or listed.
    """
    try:
        return [(root, block.key, block.parent) for root, block in scan_stored(storage)]
    except OSError as error:
        raise StoreError(
            f"storage.path: {storage.path} cannot be listed: {error.strerror}"
        ) from error
