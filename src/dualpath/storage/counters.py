"""Totals of one open store."""

from __future__ import annotations

import threading

from dualpath.storage.types import ReadStatus, WriteStatus


class Counters:
    """Monotonic totals by name. Thread safe.

    Names: ``storage_read_bytes``, ``storage_write_bytes`` (file bytes moved, headers included);
    ``storage_read_blocks_<status>``, ``storage_write_blocks_<status>``;
    ``storage_corrupt_removed``, ``storage_corrupt_kept`` (could not be removed);
    ``storage_touch_failed`` (time of use could not be noted); ``storage_evicted_blocks``,
    ``storage_evicted_bytes``, ``storage_evict_failed`` (could not be removed);
    ``storage_disk_full_bytes`` (of the evicted ones, those that went because the disk was full).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {"storage_read_bytes": 0, "storage_write_bytes": 0}
        for read in ReadStatus:
            self._totals[f"storage_read_blocks_{read.value}"] = 0
        for write in WriteStatus:
            self._totals[f"storage_write_blocks_{write.value}"] = 0
        for name in (
            "corrupt_removed", "corrupt_kept", "touch_failed",
            "evicted_blocks", "evicted_bytes", "evict_failed", "disk_full_bytes",
        ):  # fmt: skip
            self._totals[f"storage_{name}"] = 0

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one total.

        Raises:
            KeyError: there is no such total.
        """
        with self._lock:
            self._totals[name] = self._totals[name] + amount

    def add_statuses(self, statuses: list[ReadStatus] | list[WriteStatus]) -> None:
        """Count outcomes."""
        with self._lock:
            for status in statuses:
                kind = "read" if isinstance(status, ReadStatus) else "write"
                self._totals[f"storage_{kind}_blocks_{status.value}"] += 1

    def snapshot(self) -> dict[str, int]:
        """A copy of all totals, taken at one moment."""
        with self._lock:
            return dict(self._totals)
