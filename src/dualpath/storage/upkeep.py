"""What looking after a store finds out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dualpath.storage.forest import Forest, StoredFile
from dualpath.storage.types import BlockId


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


@dataclass(frozen=True, slots=True)
class Books:
    """What the processes that hold a capacity have entered; see ``capacity``."""

    published_bytes: int
    reserved_bytes: int


def stats_of(forest: Forest) -> dict[bytes, RootStats]:
    """What a forest holds, by namespace."""
    reachable = forest.reachable()
    by_root: dict[bytes, list[StoredFile]] = {}
    for file in forest.files.values():
        by_root.setdefault(file.root, []).append(file)
    return {root: _root_stats(files, reachable) for root, files in by_root.items()}


def _root_stats(files: list[StoredFile], reachable: Collection[tuple[bytes, bytes]]) -> RootStats:
    return RootStats(
        blocks=len(files),
        stored_bytes=sum(file.size_bytes for file in files),
        unreachable_blocks=sum(file.name not in reachable for file in files),
        oldest_use_s=min(file.used_s for file in files),
        newest_use_s=max(file.used_s for file in files),
    )
