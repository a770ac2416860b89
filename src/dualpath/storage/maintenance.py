"""Looking after a store while it is in use or at rest: statistics, check, eviction.

All of it works on the directory alone, beside running engines. The front's index is told by the
caller (who has the removed blocks in the result), or learns at the next read.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dualpath.storage.header import HEADER_BYTES, HeaderError, checksum, decode
from dualpath.storage.paths import scan_entries
from dualpath.storage.types import BlockId

_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class RootStats:
    """One namespace.

    Attributes:
        blocks, stored_bytes: files and their sizes.
        unreachable_blocks: whose chain of parents has a gap; no prompt can hit them now.
        oldest_use_s, newest_use_s: times of use, seconds since 1970.
    """

    blocks: int
    stored_bytes: int
    unreachable_blocks: int
    oldest_use_s: float
    newest_use_s: float


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What ``fsck`` found.

    Attributes:
        checked: blocks read.
        corrupt: ``(root, block, reason)`` of each bad one.
        removed: how many of those were removed.
    """

    checked: int
    corrupt: list[tuple[bytes, BlockId, str]]
    removed: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """What ``gc`` did.

    Attributes:
        removed: ``(root, block)`` in the order of removal.
        freed_bytes, kept_bytes: sizes of the removed and the remaining files.
    """

    removed: list[tuple[bytes, BlockId]]
    freed_bytes: int
    kept_bytes: int


@dataclass(slots=True)
class _File:
    root: bytes
    block: BlockId
    path: Path
    size_bytes: int
    used_s: float
    children: int = 0


@dataclass(slots=True)
class _Forest:
    files: dict[tuple[bytes, bytes], _File] = field(default_factory=dict)

    @classmethod
    def scan(cls, store: Path) -> _Forest:
        forest = cls()
        for root, block, entry in scan_entries(store):
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
            forest.files[root, block.key] = _File(
                root, block, Path(entry.path), info.st_size, info.st_mtime
            )
        for file in forest.files.values():
            parent = forest.files.get((file.root, file.block.parent))
            if parent is not None:
                parent.children += 1
        return forest

    def reachable(self) -> set[tuple[bytes, bytes]]:
        """Blocks with all ancestors present, up to their root."""
        known: dict[tuple[bytes, bytes], bool] = {}
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
        return {key for key in self.files if known[key]}


def stats(store: str | Path) -> dict[bytes, RootStats]:
    """Sizes by namespace, by listing directories: no block is opened.

    Raises:
        OSError: a directory cannot be listed.
    """
    forest = _Forest.scan(Path(store))
    reachable = forest.reachable()
    by_root: dict[bytes, list[_File]] = {}
    for file in forest.files.values():
        by_root.setdefault(file.root, []).append(file)
    return {
        root: RootStats(
            blocks=len(files),
            stored_bytes=sum(file.size_bytes for file in files),
            unreachable_blocks=sum((root, f.block.key) not in reachable for f in files),
            oldest_use_s=min(file.used_s for file in files),
            newest_use_s=max(file.used_s for file in files),
        )
        for root, files in by_root.items()
    }


def fsck(store: str | Path, *, repair: bool = False) -> FsckReport:
    """Read every block and verify name, header, length and checksum.

    Args:
        repair: remove the bad ones.

    Raises:
        OSError: a directory cannot be listed, or a block cannot be read or removed.
    """
    checked, removed = 0, 0
    corrupt: list[tuple[bytes, BlockId, str]] = []
    for root, block, entry in list(scan_entries(Path(store))):
        path = Path(entry.path)
        try:
            reason = _fault(path, root, block)
        except FileNotFoundError:
            continue  # removed since it was listed
        checked += 1
        if reason:
            corrupt.append((root, block, reason))
            if repair:
                path.unlink(missing_ok=True)
                removed += 1
    return FsckReport(checked, corrupt, removed)


def gc(
    store: str | Path, target_bytes: int, *, min_age_s: float = 0.0, now_s: float | None = None
) -> GcReport:
    """Remove blocks until at most ``target_bytes`` are left.

    Order: unreachable blocks first, then the least recently used leaf, again and again: a block
    is never removed before its children, so what stays can all be hit.

    Args:
        min_age_s: blocks used later than this long ago are kept, even above the target.
        now_s: the time, seconds since 1970; the present when None.

    Raises:
        OSError: a directory cannot be listed or a block not be removed.
    """
    forest = _Forest.scan(Path(store))
    latest_s = (time.time() if now_s is None else now_s) - min_age_s
    left = sum(file.size_bytes for file in forest.files.values())
    removed: list[tuple[bytes, BlockId]] = []
    freed = 0
    for file in _victims(forest, latest_s):
        if left <= target_bytes:
            break
        file.path.unlink(missing_ok=True)
        removed.append((file.root, file.block))
        freed += file.size_bytes
        left -= file.size_bytes
    return GcReport(removed, freed, left)


def _victims(forest: _Forest, latest_s: float) -> Iterator[_File]:
    """Blocks in the order in which they may go; the caller removes each before the next."""
    reachable = forest.reachable()

    def rank(file: _File) -> tuple[bool, float, bytes]:
        return (file.root, file.block.key) in reachable, file.used_s, file.block.key

    leaves = [(rank(file), file.root) for file in forest.files.values() if not file.children]
    heapq.heapify(leaves)
    while leaves:
        (_reachable, used_s, key), root = heapq.heappop(leaves)
        if used_s > latest_s:
            continue
        file = forest.files.pop((root, key))
        yield file
        parent = forest.files.get((root, file.block.parent))
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                heapq.heappush(leaves, (rank(parent), root))


def _fault(path: Path, root: bytes, block: BlockId) -> str:
    fd = os.open(path, _OPEN_FLAGS)
    with os.fdopen(fd, "rb") as file:
        data = memoryview(file.read())
    try:
        header = decode(data[:HEADER_BYTES])
    except HeaderError as error:
        return str(error)
    if (header.root, header.key, header.parent) != (root, block.key, block.parent):
        return "it holds another block"
    if len(data) != HEADER_BYTES + header.stored_bytes:
        return f"it has {len(data)} bytes"
    if checksum(data[HEADER_BYTES:]) != header.checksum:
        return "payload checksum is wrong"
    return ""
