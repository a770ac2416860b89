"""Which stored block may go next: the least recently used one without children.

Blocks of a namespace are trees under its root. Taking only leaves keeps every chain whole: what
stays can all be hit. Blocks whose chain has a gap can be hit by nobody and go before all others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dualpath.storage.paths import scan_entries, scan_files
from dualpath.storage.types import BlockId

UNKNOWN_USE_S: Final = float("-inf")
"""Time of use of a block that nobody has looked at yet: it is asked before any other."""

Name = tuple[bytes, bytes]
"""Root and key."""


@dataclass(slots=True)
class StoredFile:
    """A published block.

    Attributes:
        used_s: time of use, seconds since 1970, as last seen; never later than the true one.
    """

    root: bytes
    block: BlockId
    size_bytes: int
    used_s: float

    @property
    def name(self) -> Name:
        """What the forest calls it."""
        return self.root, self.block.key


def count_bytes(store: Path) -> int:
    """Sizes of all published files together, by listing.

    Raises:
        OSError: a directory cannot be listed.
    """
    total = 0
    for _root, entry in scan_files(store):
        try:
            total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue  # removed since it was listed
    return total


@dataclass(slots=True)
class Forest:
    """All published blocks of a store, in the order in which they may go.

    Not thread safe. Adding and discarding cost O(log n), except that a block that leaves or fills
    a gap in a chain makes everything be ranked again, once, at the next ``pop_leaf``.
    """

    files: dict[Name, StoredFile] = field(default_factory=dict)
    total_bytes: int = 0
    _children: Counter[Name] = field(default_factory=Counter)
    _reachable: set[Name] = field(default_factory=set)
    _leaves: list[tuple[bool, float, bytes, bytes]] = field(default_factory=list)
    _ranked: bool = False

    @classmethod
    def scan(cls, store: Path) -> Forest:
        """What the directory holds, by listing it.

        Raises:
            OSError: a directory cannot be listed.
        """
        forest = cls()
        files, children = forest.files, forest._children
        for root, block, entry in scan_entries(store):
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
            name = root, block.key
            if name in files:
                continue  # two names for one key: one of them is damaged, and found when read
            files[name] = StoredFile(root, block, info.st_size, info.st_mtime)
            children[root, block.parent] += 1
            forest.total_bytes += info.st_size
        return forest

    def add(self, file: StoredFile) -> None:
        """A block that is there now; one that is known already is looked at afresh."""
        known = self.files.get(file.name)
        if known is not None:
            self.total_bytes += file.size_bytes - known.size_bytes
            known.size_bytes, known.used_s = file.size_bytes, file.used_s
            self.offer(known)
            return
        self.files[file.name] = file
        self.total_bytes += file.size_bytes
        self._children[file.root, file.block.parent] += 1
        if self._children.get(file.name):
            self._ranked = False  # it fills a gap
        elif self._ranked:
            if self._grows_from_known(file):
                self._reachable.add(file.name)
            self.offer(file)

    def discard(self, root: bytes, key: bytes) -> StoredFile | None:
        """A block that is gone; None when it was not known."""
        file = self.files.pop((root, key), None)
        if file is None:
            return None
        self.total_bytes -= file.size_bytes
        self._reachable.discard(file.name)
        above = root, file.block.parent
        self._children[above] -= 1
        if not self._children[above]:
            del self._children[above]
            if above in self.files:
                self.offer(self.files[above])
        if self._children.get(file.name):
            self._ranked = False  # it leaves a gap
        return file

    def pop_leaf(self) -> StoredFile | None:
        """The block to go next, which stays in ``files``; None when there is no further one.

        The caller discards it, or puts it back with ``offer``.
        """
        if not self._ranked:
            self._rank()
        while self._leaves:
            reachable, used_s, root, key = heapq.heappop(self._leaves)
            file = self.files.get((root, key))
            if file is None or self._children.get((root, key)):
                continue
            if (reachable, used_s) == ((root, key) in self._reachable, file.used_s):
                return file
        return None

    def offer(self, file: StoredFile) -> None:
        """Let ``pop_leaf`` give this block again, by its present time of use."""
        if self._ranked and not self._children.get(file.name):
            root, key = file.name
            heapq.heappush(self._leaves, (file.name in self._reachable, file.used_s, root, key))

    def reachable(self) -> set[Name]:
        """Blocks with all ancestors present, up to their root."""
        known: dict[Name, bool] = {}
        for start in self.files:
            path = []
            at = start
            while at not in known:
                file = self.files.get(at)
                if file is None:
                    known[at] = at[1] == at[0]  # the root's digest is a first block's parent
                    break
                path.append(at)
                at = (file.root, file.block.parent)
            for step in path:
                known[step] = known[at]
        return {name for name in self.files if known[name]}

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            AssertionError: a count is off.
        """
        assert self.total_bytes == sum(file.size_bytes for file in self.files.values())
        children = Counter((file.root, file.block.parent) for file in self.files.values())
        assert children == self._children
        assert not self._ranked or self._reachable == self.reachable()

    def _grows_from_known(self, file: StoredFile) -> bool:
        above = file.root, file.block.parent
        return above in self._reachable or file.block.parent == file.root

    def _rank(self) -> None:
        self._reachable = self.reachable()
        self._leaves = [
            (name in self._reachable, file.used_s, *name)
            for name, file in self.files.items()
            if not self._children.get(name)
        ]
        heapq.heapify(self._leaves)
        self._ranked = True
