"""Looking after a store in a bucket."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from dualpath.config import S3Config
from dualpath.storage.counters import Counters
from dualpath.storage.objects import ledger
from dualpath.storage.objects.bucket import Bucket, Found, ObjectError
from dualpath.storage.objects.capacity import Capacity
from dualpath.storage.objects.index import forest_of
from dualpath.storage.objects.names import block_object, parse_object
from dualpath.storage.objects.store import scan_bucket
from dualpath.storage.paths import BLOCKS_DIR
from dualpath.storage.types import BlockId
from dualpath.storage.upkeep import Books, FsckReport, GcReport, RootStats, stats_of
from dualpath.storage.verify import fault_of

_GC_DEADLINE_S: Final = 600.0
"""Listing a large bucket takes minutes."""


class BucketUpkeep:
    """See ``Upkeep``. Times of use are the times when blocks were written: S3 keeps no others."""

    def __init__(self, bucket: Bucket, settings: S3Config) -> None:
        self.where = bucket.where
        self._bucket = bucket
        self._pool = ThreadPoolExecutor(settings.connections, thread_name_prefix="dualpath-s3")

    def scan(self) -> Iterator[tuple[bytes, BlockId]]:
        """See ``Upkeep``."""
        return scan_bucket(self._bucket)

    def stats(self) -> dict[bytes, RootStats]:
        """See ``Upkeep``."""
        return stats_of(forest_of(self._bucket.list(BLOCKS_DIR)))

    def books(self) -> Books | None:
        """See ``Upkeep``."""
        found = ledger.load(self._bucket)
        if found is None:
            return None
        return Books(found[0].published_bytes, found[0].reserved_bytes)

    def fsck(self, *, repair: bool = False) -> FsckReport:
        """See ``Upkeep``."""
        checked, removed = 0, 0
        corrupt: list[tuple[bytes, BlockId, str]] = []
        with self._account() as account:
            for found in self._bucket.list(BLOCKS_DIR):
                named = parse_object(found.name)
                reason = None if named is None else self._fault(found, *named)
                if named is None or reason is None:
                    continue
                checked += 1
                if reason:
                    corrupt.append((*named, reason))
                    if repair and self._still(found):
                        self._bucket.delete(found.name)
                        removed += 1
                        if account is not None:
                            account.gone(*named)
        return FsckReport(checked, corrupt, removed)

    def gc(self, target_bytes: int, *, min_age_s: float = 0.0) -> GcReport:
        """See ``Upkeep``."""
        latest_s = time.time() - min_age_s
        with self._account() as account:
            if account is None:
                return self._gc_plain(target_bytes, latest_s)
            gone, left = account.shrink(target_bytes, latest_s, time.monotonic() + _GC_DEADLINE_S)
        removed = [(file.root, file.block) for file in gone]
        return GcReport(removed, sum(file.size_bytes for file in gone), left)

    def close(self) -> None:
        """See ``Upkeep``."""
        self._pool.shutdown()

    @contextmanager
    def _account(self) -> Iterator[Capacity | None]:
        """A part in the account, where there is one."""
        if not ledger.exists(self._bucket):
            yield None
            return
        account = Capacity(self._bucket, 0, Counters(), self._pool)
        try:
            yield account
        finally:
            account.leave()

    def _gc_plain(self, target_bytes: int, latest_s: float) -> GcReport:
        """``gc`` where nobody keeps account."""
        forest = forest_of(self._bucket.list(BLOCKS_DIR))
        removed: list[tuple[bytes, BlockId]] = []
        freed = 0
        while forest.total_bytes > target_bytes and (file := forest.pop_leaf()) is not None:
            if file.used_s > latest_s:
                continue
            self._bucket.delete(block_object(file.root, file.block))
            forest.discard(*file.name)
            removed.append((file.root, file.block))
            freed += file.size_bytes
        return GcReport(removed, freed, forest.total_bytes)

    def _fault(self, found: Found, root: bytes, block: BlockId) -> str | None:
        """What is wrong with a block; None when it is gone since it was listed."""
        try:
            body = self._bucket.get(found.name).body()
        except ObjectError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return fault_of(body, root, block)

    def _still(self, found: Found) -> bool:
        """Whether nobody has put another block in its place."""
        now = self._bucket.head(found.name)
        return now is not None and now.etag == found.etag
