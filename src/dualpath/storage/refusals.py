"""What follows from a refusal: it is said once, and blocks behind the refused one are not tried."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from dualpath.storage.forest import Name
from dualpath.storage.paths import block_dir
from dualpath.storage.types import BlockId, WriteStatus

log = logging.getLogger(__name__)

REPEAT_AFTER_S: Final = 60.0
"""A store at its limit may change its mind at every write; it says so no oftener than this."""
REMEMBERED: Final = 4096
"""Refused blocks kept in mind; one that is forgotten only lets a useless block be stored."""
_REFUSED: Final = {
    WriteStatus.FULL: "there is no room, and all that is stored is in use, or eviction did not "
    "help; raise storage.capacity, or free the disk or its quota",
    WriteStatus.READ_ONLY: "it cannot be written; see mount and permissions",
    WriteStatus.FAILED: "it reports errors; see the log of its server or of the kernel",
}
_NO_EVICTION: Final = (
    "there is no room, and without storage.capacity nothing is evicted here; set it, or run "
    "'dualpath store gc --target SIZE'"
)


class Refusals:
    """What a store's writer last said about it. Thread safe."""

    def __init__(self, *, evicts: bool) -> None:
        self._evicts = evicts
        self._lock = threading.Lock()
        self._said: WriteStatus | None = None
        self._said_s = float("-inf")

    def note(self, store: object, statuses: Collection[WriteStatus]) -> None:
        """Look at the outcomes of one write. An unchanged state is not said again; the counters
        have every block."""
        refused = next((status for status in statuses if status in _REFUSED), None)
        if refused is None and WriteStatus.PUBLISHED not in statuses:
            return  # nothing was tried that could have shown anything
        now = time.monotonic()
        with self._lock:
            if refused is self._said or now - self._said_s < REPEAT_AFTER_S:
                return
            self._said, self._said_s = refused, now
        if refused is None:
            log.warning("store %s takes blocks again", store)
        else:
            why = _REFUSED[refused]
            if refused is WriteStatus.FULL and not self._evicts:
                why = _NO_EVICTION
            log.warning(
                "store %s does not take new blocks: %s. Serving goes on without storing them",
                store, why,
            )  # fmt: skip


class Gaps:
    """Blocks that got no room lately. Thread safe.

    What stands on one of them could be hit by nobody: it must not take room, least of all by
    evicting the good beginning of its own chain.
    """

    def __init__(self, is_stored: Callable[[bytes, bytes], bool]) -> None:
        """``is_stored`` says whether somebody has stored root and key since."""
        self._is_stored = is_stored
        self._lock = threading.Lock()
        self._refused: OrderedDict[Name, None] = OrderedDict()

    def behind(self, root: bytes, blocks: Sequence[BlockId]) -> set[int]:
        """Indexes of those ``blocks`` that stand on a refused one."""
        keys = {block.key for block in blocks}
        with self._lock:
            refused = {b.parent for b in blocks if (root, b.parent) in self._refused} - keys
        missing = {key for key in refused if not self._is_stored(root, key)}
        found: set[int] = set()
        for index, block in enumerate(blocks):
            if block.parent in missing:
                found.add(index)
                missing.add(block.key)
        return found

    def note(self, root: bytes, blocks: Sequence[BlockId], statuses: Sequence[WriteStatus]) -> None:
        """Learn from the outcomes of a write."""
        with self._lock:
            for block, status in zip(blocks, statuses, strict=True):
                if status is WriteStatus.FULL:
                    self._refused[root, block.key] = None
                else:
                    self._refused.pop((root, block.key), None)
            while len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)


def stored_in(store: Path) -> Callable[[bytes, bytes], bool]:
    """For ``Gaps``: looks into a directory."""

    def is_stored(root: bytes, key: bytes) -> bool:
        try:
            with os.scandir(block_dir(store, root, key)) as entries:
                return any(entry.name.startswith(key.hex()) for entry in entries)
        except OSError:
            return False

    return is_stored
