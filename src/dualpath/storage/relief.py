"""What is done when the disk itself is full: old blocks go, as long as that helps."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Final

from dualpath.storage.room import Room

log = logging.getLogger(__name__)

TRIES: Final = 2
"""How often one batch makes room: what was freed may be gone to somebody else the first time."""
PAUSE_S: Final = 30.0
"""For so long nothing is evicted after it did not help. A disk that others fill, or a quota that
our files do not count in, must not cost the whole store."""
_REPEAT_AFTER_S: Final = 60.0


class Relief:
    """Makes room on a full disk by eviction. Thread safe."""

    def __init__(self, store: Path, room: Room) -> None:
        self._store = store
        self._room = room
        self._lock = threading.Lock()
        self._paused_until_s = float("-inf")
        self._said_s = float("-inf")

    def make_room(self, wanted_bytes: int, deadline: float) -> bool:
        """Evict about ``wanted_bytes``; whether trying again may help."""
        if not self._room.evicts or time.monotonic() < self._paused_until_s:
            return False
        try:
            freed = self._room.make_room(wanted_bytes, deadline)
        except OSError as error:
            log.warning("store %s: the disk is full, nothing is evicted: %s", self._store, error)
            freed = 0
        if not freed:
            self.in_vain()
            return False
        if self._to_be_said():
            log.warning(
                "store %s: the disk or its quota is full; the least recently used blocks go (%d "
                "bytes now). To keep room for other things, set storage.capacity, or free the disk",
                self._store, freed,
            )  # fmt: skip
        return True

    def in_vain(self) -> None:
        """Eviction did not make room: none for a while."""
        self._paused_until_s = time.monotonic() + PAUSE_S

    def _to_be_said(self) -> bool:
        now = time.monotonic()
        with self._lock:
            if now - self._said_s < _REPEAT_AFTER_S:
                return False
            self._said_s = now
            return True
