"""The persistent KV store in a bucket: one object a Full Block, header and all, as in a file.

An object appears whole or not at all, so publishing is one request. What is read lands in memory
of the client library first and is copied into the slots by the caller's thread; therefore a read
may be given up at its deadline, whatever the network does afterwards. A write is waited for: its
requests read the slots.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from dualpath.blocks import BlockLayout
from dualpath.config import StorageConfig
from dualpath.storage.counters import Counters
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.limiter import Limiter
from dualpath.storage.memory import check_call
from dualpath.storage.objects import ledger
from dualpath.storage.objects.account import BlockAccount, NoAccount
from dualpath.storage.objects.bucket import Bucket, ObjectError
from dualpath.storage.objects.capacity import Capacity
from dualpath.storage.objects.names import PROBE_FOLDER, block_object, parse_object, root_folder
from dualpath.storage.objects.reading import ObjectReader
from dualpath.storage.objects.writing import ObjectWriter, stored_in
from dualpath.storage.refusals import Gaps, Refusals
from dualpath.storage.types import (
    BlockId,
    ReadStatus,
    StoreClosedError,
    StoreError,
    WriteStatus,
    status_of,
)

log = logging.getLogger(__name__)


class ObjectStore:
    """A ``Store`` in a bucket. See there."""

    io_name = "s3"
    direct = True

    def __init__(
        self,
        bucket: Bucket,
        layout: BlockLayout,
        reader: ObjectReader,
        writer: ObjectWriter,
        counters: Counters,
        account: BlockAccount,
        pools: Sequence[ThreadPoolExecutor],
    ) -> None:
        """Use ``open``."""
        self.layout = layout
        self.writable = writer.closed_status is None
        self.capacity_bytes = account.capacity_bytes
        self.evicts = account.capacity_bytes > 0
        self._bucket = bucket
        self._reader = reader
        self._writer = writer
        self._counters = counters
        self._account = account
        self._pools = pools
        self._closed = False

    @classmethod
    def open(
        cls,
        storage: StorageConfig,
        layout: BlockLayout,
        *,
        read_limiter: Limiter | None = None,
        write_limiter: Limiter | None = None,
    ) -> ObjectStore:
        """Open the store that ``storage`` describes; the bucket must exist, the prefix need not.

        Args:
            layout: geometry of the blocks; an object of another geometry counts as corrupt.
            read_limiter, write_limiter: the node's storage NIC; unlimited when None.

        Raises:
            StoreError: the bucket cannot be reached or read, or the capacity not be kept.
        """
        object_bytes = HEADER_BYTES + layout.slot_bytes
        if 0 < storage.capacity < object_bytes:
            raise StoreError(
                f"storage.capacity: {storage.capacity} bytes hold no block of {object_bytes} bytes"
            )
        settings = storage.s3
        counters = Counters()
        most = min(storage.batch_blocks, settings.connections)
        with ExitStack() as undo:
            pools = [
                ThreadPoolExecutor(settings.connections, thread_name_prefix=f"dualpath-s3-{name}")
                for name in ("read", "write", "evict")
            ]
            for pool in pools:
                undo.callback(pool.shutdown)
            try:
                bucket = Bucket(*storage.bucket, settings)
                exclusive, closed_status = _probe(bucket)
                account = _account(storage, bucket, exclusive, closed_status, counters, pools[2])
            except OSError as error:
                raise StoreError(
                    f"storage.path: {storage.path} cannot be used: {error.strerror}"
                ) from error
            undo.pop_all()  # from here on they belong to the store
        reader = ObjectReader(
            bucket, layout.full_block_bytes, layout.slot_bytes, most,
            read_limiter or Limiter.unlimited(), closed_status is None, counters, account, pools[0],
        )  # fmt: skip
        writer = ObjectWriter(
            bucket, layout, most, write_limiter or Limiter.unlimited(), exclusive, closed_status,
            counters, account, pools[1], Gaps(stored_in(bucket)),
            Refusals(evicts=account.capacity_bytes > 0),
        )  # fmt: skip
        log.info(
            "store %s: %s, conditional writes %s, capacity %s", bucket.where,
            "writable" if closed_status is None else "read-only", "on" if exclusive else "off",
            storage.capacity or "unlimited",
        )  # fmt: skip
        return cls(bucket, layout, reader, writer, counters, account, pools)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        """See ``Store``."""
        return self._reader.read(root, blocks, self._checked(root, blocks, slots), deadline)

    def write(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """See ``Store``."""
        return self._writer.write(root, blocks, self._checked(root, blocks, slots), deadline)

    def scan(self, root: bytes | None = None) -> Iterator[tuple[bytes, BlockId]]:
        """See ``Store``."""
        self._check_open()
        return scan_bucket(self._bucket, root)

    def remove(self, root: bytes, block: BlockId) -> bool:
        """See ``Store``."""
        self._check_open()
        name = block_object(root, block)
        if self._bucket.head(name) is None:
            return False
        self._bucket.delete(name)
        self._account.gone(root, block)
        return True

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``Store``."""
        self._check_open()
        self._account.pin(root, key, deadline)

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``Store``."""
        self._check_open()
        self._account.unpin(root, key)

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``Store``."""
        return self._account.take_evicted()

    def counters(self) -> dict[str, int]:
        """See ``Store``."""
        return self._counters.snapshot()

    def close(self) -> None:
        """See ``Store``. Waits for reads that were given up, which end within their bounds."""
        if self._closed:
            return
        self._closed = True
        self._account.leave()
        for pool in self._pools:
            pool.shutdown(wait=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"store {self._bucket.where} is closed")

    def _checked(
        self, root: bytes, blocks: Sequence[BlockId], slots: Sequence[memoryview]
    ) -> list[memoryview]:
        self._check_open()
        return check_call(root, blocks, slots, self.layout.slot_bytes)


def scan_bucket(bucket: Bucket, root: bytes | None = None) -> Iterator[tuple[bytes, BlockId]]:
    """Names of all blocks, or of one namespace, page by page.

    Raises:
        ObjectError: the bucket cannot be listed.
    """
    for found in bucket.list(root_folder(root)):
        named = parse_object(found.name)
        if named is not None:
            yield named


def _probe(bucket: Bucket) -> tuple[bool, WriteStatus | None]:
    """Whether conditional writes work, and why nothing can be written, if so.

    Raises:
        ObjectError: the bucket is not there, or does not answer.
    """
    name = f"{PROBE_FOLDER}/{secrets.token_hex(8)}"
    try:
        etag = bucket.put(name, b"1")
    except ObjectError as error:
        status = status_of(error.errno or errno.EIO)
        if status not in (WriteStatus.READ_ONLY, WriteStatus.FULL):
            raise
        next(bucket.list(PROBE_FOLDER), None)  # at least this must be allowed
        log.warning(
            "store %s can only be read until it is opened again: %s", bucket.where, error.strerror
        )
        return False, status
    try:
        taken = _refuses(bucket, name, absent=True)
        changed = bool(etag) and _refuses(bucket, name, etag='"another"')
        return taken and changed, None
    finally:
        bucket.delete(name)


def _refuses(bucket: Bucket, name: str, *, absent: bool = False, etag: str = "") -> bool:
    """Whether a condition that does not hold keeps an object from being written."""
    try:
        bucket.put(name, b"2", absent=absent, etag=etag)
    except ObjectError as error:
        return error.errno in (errno.EEXIST, errno.ESTALE)
    return False


def _account(
    storage: StorageConfig,
    bucket: Bucket,
    exclusive: bool,
    closed_status: WriteStatus | None,
    counters: Counters,
    pool: ThreadPoolExecutor,
) -> BlockAccount:
    if closed_status is not None:
        return NoAccount()  # nothing is written, and nothing can be removed
    if not storage.capacity and not ledger.exists(bucket):
        return NoAccount()
    if not exclusive:
        raise StoreError(
            f"storage.capacity: {storage.path} does not take conditional writes "
            "(If-None-Match, If-Match), so no limit can be kept; leave capacity out"
        )
    capacity = Capacity(bucket, storage.capacity, counters, pool)
    capacity.join()
    return capacity
