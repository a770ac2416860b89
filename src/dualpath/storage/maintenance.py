"""Looking after a store while it is in use or at rest: statistics, check, eviction.

All of it works on the directory alone, beside running engines. The front's index is told by the
caller (who has the removed blocks in the result), or learns at the next read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from dualpath.storage.capacity import Ledger
from dualpath.storage.forest import Forest
from dualpath.storage.paths import block_path, scan_blocks
from dualpath.storage.room import Unlimited, settle_deadline
from dualpath.storage.types import BlockId
from dualpath.storage.upkeep import (
    Books,
    FsckReport,
    GcReport,
    RootStats,
    stats_of,
)
from dualpath.storage.verify import fault_of

GC_DEADLINE_S: Final = 60.0
"""How long ``gc`` waits for running engines to let it at the books."""
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def stats(store: str | Path) -> dict[bytes, RootStats]:
    """Sizes by namespace, by listing directories: no block is opened.

    Raises:
        OSError: a directory cannot be listed.
    """
    return stats_of(Forest.scan(Path(store)))


def books(store: str | Path) -> Books | None:
    """The capacity's account; None where nobody keeps one, or keeps it without counting.

    Raises:
        OSError: it cannot be used, or is held by another process for too long.
    """
    store = Path(store)
    if not Ledger.exists(store):
        return None
    with closing(Ledger.visit(store)) as ledger:
        totals = ledger.usage(settle_deadline())
    return Books(totals.published_bytes, totals.reserved_bytes) if totals.counted else None


def fsck(store: str | Path, *, repair: bool = False) -> FsckReport:
    """Read every block and verify name, header, length and checksum.

    Args:
        repair: remove the bad ones.

    Raises:
        OSError: a directory cannot be listed, or a block cannot be read or removed.
    """
    store = Path(store)
    checked, removed = 0, 0
    bad: list[tuple[Path, int]] = []
    corrupt: list[tuple[bytes, BlockId, str]] = []
    for root, block in list(scan_blocks(store)):
        path = block_path(store, root, block)
        try:
            reason = _fault(path, root, block)
        except FileNotFoundError:
            continue  # removed since it was listed
        checked += 1
        if reason:
            corrupt.append((root, block, reason))
            if repair:
                bad.append((path, path.stat().st_ino))
    with _room(store) as room:
        for path, inode in bad:
            with room.changing(settle_deadline()) as changes:
                # A good block may have taken its place since it was read.
                if path.exists() and path.stat().st_ino == inode:
                    path.unlink()
                    changes.uncertain()
                    removed += 1
    return FsckReport(checked, corrupt, removed)


def gc(
    store: str | Path, target_bytes: int, *, min_age_s: float = 0.0, now_s: float | None = None
) -> GcReport:
    """Remove blocks until at most ``target_bytes`` are left.

    What a running engine has pinned stays, where a capacity is kept (see ``capacity``).

    Order: unreachable blocks first, then the least recently used leaf, again and again: a block
    is never removed before its children, so what stays can all be hit.

    Args:
        min_age_s: blocks used later than this long ago are kept, even above the target.
        now_s: the time, seconds since 1970; the present when None.

    Raises:
        OSError: a directory cannot be listed or a block not be removed.
    """
    store = Path(store)
    latest_s = (time.time() if now_s is None else now_s) - min_age_s
    if Ledger.exists(store):
        with closing(Ledger.visit(store)) as ledger:
            done = ledger.shrink(target_bytes, latest_s, time.monotonic() + GC_DEADLINE_S)
        freed = sum(size for _root, _block, size in done.removed)
        removed = [(root, block) for root, block, _size in done.removed]
        return GcReport(removed, freed, done.left_bytes)
    return _gc_plain(store, target_bytes, latest_s)


def _gc_plain(store: Path, target_bytes: int, latest_s: float) -> GcReport:
    """``gc`` where nobody keeps account."""
    forest = Forest.scan(store)
    removed: list[tuple[bytes, BlockId]] = []
    freed = 0
    while forest.total_bytes > target_bytes and (file := forest.pop_leaf()) is not None:
        if file.used_s > latest_s:
            continue
        block_path(store, file.root, file.block).unlink(missing_ok=True)
        forest.discard(*file.name)
        removed.append((file.root, file.block))
        freed += file.size_bytes
    return GcReport(removed, freed, forest.total_bytes)


def _room(store: Path) -> closing[Ledger | Unlimited]:
    return closing(Ledger.visit(store) if Ledger.exists(store) else Unlimited(store))


def _fault(path: Path, root: bytes, block: BlockId) -> str:
    fd = os.open(path, _OPEN_FLAGS)
    with os.fdopen(fd, "rb") as file:
        data = memoryview(file.read())
    return fault_of(data, root, block)


class DirectoryUpkeep:
    """See ``Upkeep``: the functions above, for one directory."""

    def __init__(self, store: Path) -> None:
        self.where = str(store)
        self._store = store

    def scan(self) -> Iterator[tuple[bytes, BlockId]]:
        """See ``Upkeep``."""
        return scan_blocks(self._store)

    def stats(self) -> dict[bytes, RootStats]:
        """See ``Upkeep``."""
        return stats(self._store)

    def books(self) -> Books | None:
        """See ``Upkeep``."""
        return books(self._store)

    def fsck(self, *, repair: bool = False) -> FsckReport:
        """See ``Upkeep``."""
        return fsck(self._store, repair=repair)

    def gc(self, target_bytes: int, *, min_age_s: float = 0.0) -> GcReport:
        """See ``Upkeep``."""
        return gc(self._store, target_bytes, min_age_s=min_age_s)

    def close(self) -> None:
        """See ``Upkeep``. Nothing is held."""
