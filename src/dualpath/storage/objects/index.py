"""A process's own index of a bucket: which block may go next.

Made by a listing and kept current from the account's events. The time of use of a block is what
this process has seen of it - its own reads, and the pins of all - and else the time when the
block was written: S3 notes no reads. A restart forgets what was seen.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Final

from dualpath.storage.forest import Forest, Name, StoredFile
from dualpath.storage.objects.bucket import Bucket, Found
from dualpath.storage.objects.ledger import Account, EventKind
from dualpath.storage.objects.names import parse_object
from dualpath.storage.paths import BLOCKS_DIR
from dualpath.storage.types import BlockId

_MOST_USES: Final = 1 << 20
"""Times of use kept in mind; beyond that the older half is forgotten."""


class Index:
    """See above. ``used`` may be called by any thread; the rest by one at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._forest: Forest | None = None
        self._at = 0
        self._lock = threading.Lock()
        self._uses: dict[Name, float] = {}

    @property
    def ready(self) -> bool:
        """Whether it is up to date; else ``relist``."""
        return self._forest is not None

    def used(self, root: bytes, blocks: Iterable[BlockId], at_s: float) -> None:
        """Blocks were read."""
        with self._lock:
            for block in blocks:
                self._uses.pop((root, block.key), None)  # the newest stand last
                self._uses[root, block.key] = at_s
            if len(self._uses) > _MOST_USES:
                for name in list(self._uses)[: _MOST_USES // 2]:
                    del self._uses[name]

    def relist(self, account: Account) -> int:
        """Make the index anew; returns the bytes of all blocks, without those being removed.

        Args:
            account: as it was before this call.

        Raises:
            ObjectError: the bucket cannot be listed.
        """
        self._forest = None
        forest = forest_of(self._bucket.list(BLOCKS_DIR))
        for name in account.claimed():
            forest.discard(*name)
        self._forest, self._at = forest, account.sequence
        return forest.total_bytes

    def catch_up(self, account: Account) -> bool:
        """Bring the index up to date; False when it must be made anew."""
        if self._forest is None:
            return False
        events = account.since(self._at)
        if events is None:
            self._forest = None
            return False
        for event in events:
            if event.kind == EventKind.PUBLISHED:
                self._forest.add(StoredFile(event.root, event.block, event.size_bytes, event.at_s))
            elif event.kind == EventKind.REMOVED:
                self._forest.discard(event.root, event.key)
            else:
                self.used(event.root, [event.block], event.at_s)
        self._at = account.sequence
        return True

    def take(
        self, excess_bytes: int, pinned: Collection[Name], latest_s: float, most: int
    ) -> list[StoredFile]:
        """Take out what may go, in order, until ``excess_bytes`` are reached or nothing more may.

        Spares what is pinned and what was used after ``latest_s``.
        """
        assert self._forest is not None
        taken: list[StoredFile] = []
        spared: list[StoredFile] = []
        while excess_bytes > 0 and len(taken) < most:
            file = self._forest.pop_leaf()
            if file is None:
                break
            if self._renew(file):
                self._forest.offer(file)
            elif file.name in pinned or file.used_s > latest_s:
                spared.append(file)
            else:
                self._forest.discard(*file.name)
                taken.append(file)
                excess_bytes -= file.size_bytes
        for file in spared:
            self._forest.offer(file)
        return taken

    def put_back(self, file: StoredFile) -> None:
        """It was taken, and stays after all."""
        if self._forest is not None:
            self._forest.add(file)

    def _renew(self, file: StoredFile) -> bool:
        """Give a block and those it stands on the time of use that we know of; whether there was
        a later one."""
        assert self._forest is not None
        with self._lock:
            used_s = self._uses.get(file.name, file.used_s)
        if used_s <= file.used_s:
            return False
        above: StoredFile | None = file
        while above is not None and above.used_s < used_s:
            above.used_s = used_s
            above = self._forest.files.get((above.root, above.block.parent))
        return True


def forest_of(listing: Iterable[Found]) -> Forest:
    """All blocks of a listing."""
    forest = Forest()
    for found in listing:
        named = parse_object(found.name)
        if named is not None:
            root, block = named
            # Two names for one key: one of them is damaged, and found when it is read.
            if (root, block.key) not in forest.files:
                forest.add(StoredFile(root, block, found.size_bytes, found.modified_s))
    return forest
