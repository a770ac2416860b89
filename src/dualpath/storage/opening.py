"""The one place that decides, from the description, which kind of store is meant."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dualpath.blocks import BlockLayout
from dualpath.config import StorageConfig
from dualpath.storage.epoch import EpochFile
from dualpath.storage.interface import Epochs, Store, Upkeep
from dualpath.storage.limiter import Limiter
from dualpath.storage.maintenance import DirectoryUpkeep
from dualpath.storage.store import BlockStore
from dualpath.storage.types import BlockId, StoreError
from dualpath.storage.usrbio import Iov, load_usrbio


def open_store(
    storage: StorageConfig,
    layout: BlockLayout,
    *,
    read_limiter: Limiter | None = None,
    write_limiter: Limiter | None = None,
) -> Store:
    """Open the store that ``storage`` describes, making it when missing.

    Args:
        layout: geometry of the blocks; one of another geometry counts as corrupt.
        read_limiter, write_limiter: the node's storage NIC; unlimited when None.

    Raises:
        StoreError: it cannot be used; ``UnsupportedIoError`` when what was demanded does not work.
    """
    if storage.in_bucket:
        store: Store = _objects().ObjectStore.open(
            storage, layout, read_limiter=read_limiter, write_limiter=write_limiter
        )
        return store
    return BlockStore.open(
        storage.path,
        layout,
        io=storage.io,
        direct=storage.direct,
        fsync=storage.fsync,
        batch_blocks=storage.batch_blocks,
        read_limiter=read_limiter,
        write_limiter=write_limiter,
        capacity_bytes=storage.capacity,
        usrbio_library=storage.usrbio_library,
    )


def buffer_memory(storage: StorageConfig, size_bytes: int, slot_bytes: int) -> Iov | None:
    """Memory for blocks that the store moves into and out of without a copy, where that needs
    memory of a kind of its own: USRBIO. None: any page-aligned memory is as good.

    It stays until the process ends; 3FS's daemon then takes it back.

    Args:
        slot_bytes: divides ``size_bytes``; the store is only ever given whole slots.

    Raises:
        StoreError: there is none; ``UnsupportedIoError`` when USRBIO does not work here.
    """
    if storage.in_bucket or storage.io != "usrbio":
        return None
    library = load_usrbio(storage.usrbio_library)
    path = Path(storage.path).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        return library.memory(library.mount_of(path), size_bytes, slot_bytes)
    except OSError as error:
        raise StoreError(f"storage.io: {error.strerror}") from error


def open_epochs(storage: StorageConfig) -> Epochs:
    """The weight epoch of the store that ``storage`` describes. Reads nothing yet.

    Raises:
        StoreError: the library for it is not installed, or the server's address makes no sense.
    """
    if storage.in_bucket:
        epochs: Epochs = _objects().EpochObject(_bucket(storage))
        return epochs
    return EpochFile(storage.path)


def open_upkeep(storage: StorageConfig) -> Upkeep:
    """What looks after the store that ``storage`` describes. Reads nothing yet.

    Raises:
        StoreError: as ``open_epochs``.
    """
    if storage.in_bucket:
        upkeep: Upkeep = _objects().BucketUpkeep(_bucket(storage), storage.s3)
        return upkeep
    return DirectoryUpkeep(Path(storage.path))


def scan_stored(storage: StorageConfig) -> Iterator[tuple[bytes, BlockId]]:
    """``(root, block)`` of every published block, as a stream, by listing alone.

    Raises:
        StoreError: as ``open_epochs``.
        OSError: it cannot be listed.
    """
    with closing(open_upkeep(storage)) as upkeep:
        yield from upkeep.scan()


@contextmanager
def scratch_in_bucket(storage: StorageConfig, name: str) -> Iterator[StorageConfig]:
    """A store of its own below the one in the bucket that ``storage`` describes; all of it is
    removed at the end.

    Raises:
        StoreError: as ``open_epochs``.
        OSError: it cannot be removed.
    """
    path = f"{storage.path.rstrip('/')}/{name}-{secrets.token_hex(8)}"
    own = msgspec.structs.replace(storage, path=path)
    bucket = _bucket(own)
    try:
        yield own
    finally:
        bucket.wipe()


def _objects() -> Any:
    """The room for buckets, whose library not every installation has."""
    try:
        return importlib.import_module("dualpath.storage.objects")
    except ImportError as error:
        raise StoreError(
            f"storage.path: a bucket needs obstore ({error}): pip install 'dualpath[s3]'"
        ) from None


def _bucket(storage: StorageConfig) -> Any:
    try:
        return _objects().Bucket(*storage.bucket, storage.s3)
    except OSError as error:
        raise StoreError(f"storage.s3: {error.strerror}") from None
