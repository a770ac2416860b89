"""Index of stored blocks with longest-prefix lookup.

Keys are chain hashes, so a key already stands for its whole prefix: the trie needs no token
comparisons, only parent links. Parents are known to children so that capacity code can evict
leaves first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    parent: bytes
    children: int = 0


@dataclass(slots=True)
class BlockTrie:
    """Set of ``(key, parent)`` blocks. Not thread safe; one owner.

    A block may be present while its parent is not (blocks of one turn are published in any
    order); lookups stop at the first gap, so such a block is simply not reachable yet.
    """

    _nodes: dict[bytes, _Node] = field(default_factory=dict)
    _orphan_children: dict[bytes, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return ((key, node.parent) for key, node in self._nodes.items())

    def insert(self, key: bytes, parent: bytes) -> bool:
        """Add a block; returns False when it was there already."""
        if key in self._nodes:
            return False
        self._nodes[key] = _Node(parent, self._orphan_children.pop(key, 0))
        if (node := self._nodes.get(parent)) is not None:
            node.children += 1
        else:
            self._orphan_children[parent] = self._orphan_children.get(parent, 0) + 1
        return True

    def remove(self, key: bytes) -> bool:
        """Forget a block (its children stay, unreachable until it comes back)."""
        node = self._nodes.pop(key, None)
        if node is None:
            return False
        if node.children:
            self._orphan_children[key] = node.children
        if (parent := self._nodes.get(node.parent)) is not None:
            parent.children -= 1
        else:
            left = self._orphan_children[node.parent] - 1
            if left:
                self._orphan_children[node.parent] = left
            else:
                del self._orphan_children[node.parent]
        return True

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Number of leading ``keys`` that are all present."""
        nodes = self._nodes
        for count, key in enumerate(keys):
            if key not in nodes:
                return count
        return len(keys)

    def is_leaf(self, key: bytes) -> bool:
        """Whether no stored block continues ``key``.

        Raises:
            KeyError: ``key`` is not stored.
        """
        return self._nodes[key].children == 0

    def clear(self) -> None:
        """Forget everything."""
        self._nodes.clear()
        self._orphan_children.clear()

    def check_integrity(self) -> None:
        """Recount children from parent links.

        Raises:
            AssertionError: a count is off.
        """
        counts: dict[bytes, int] = {}
        for node in self._nodes.values():
            counts[node.parent] = counts.get(node.parent, 0) + 1
        for key, node in self._nodes.items():
            assert node.children == counts.pop(key, 0), f"child count of {key.hex()} is off"
        assert counts == self._orphan_children, "orphan counts are off"
