"""Looking after a store while it is in use or at rest: statistics, check, eviction.

All of it works on the directory alone, beside running engines. The front's index is told by the
caller (who has the removed blocks in the result), or learns at the next read.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualpath.storage.capacity import Ledger
from dualpath.storage.forest import Forest, StoredFile
from dualpath.storage.header import HEADER_BYTES, HeaderError, checksum, decode
from dualpath.storage.paths import block_path, scan_entries
from dualpath.storage.room import Unlimited, settle_deadline
from dualpath.storage.types import BlockId

GC_DEADLINE_S: Final = 60.0
"""How long ``gc`` waits for running engines to let it at the books."""
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


def stats(store: str | Path) -> dict[bytes, RootStats]:
    """Sizes by namespace, by listing directories: no block is opened.

    Raises:
        OSError: a directory cannot be listed.
    """
    forest = Forest.scan(Path(store))
    reachable = forest.reachable()
    by_root: dict[bytes, list[StoredFile]] = {}
    for file in forest.files.values():
        by_root.setdefault(file.root, []).append(file)
    return {
        root: RootStats(
            blocks=len(files),
            stored_bytes=sum(file.size_bytes for file in files),
            unreachable_blocks=sum(f.name not in reachable for f in files),
            oldest_use_s=min(file.used_s for file in files),
            newest_use_s=max(file.used_s for file in files),
        )
        for root, files in by_root.items()
    }


@dataclass(frozen=True, slots=True)
class Books:
    """What the processes that hold a capacity have entered; see ``capacity``."""

    published_bytes: int
    reserved_bytes: int


def books(store: str | Path) -> Books | None:
    """The capacity's account; None where nobody keeps one.

    Raises:
        OSError: it cannot be used, or is held by another process for too long.
    """
    store = Path(store)
    if not Ledger.exists(store):
        return None
    with closing(Ledger.visit(store)) as ledger:
        totals = ledger.usage(settle_deadline())
    return Books(totals.published_bytes, totals.reserved_bytes)


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
    for root, block, entry in list(scan_entries(store)):
        path = Path(entry.path)
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
