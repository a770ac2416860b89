"""The persistent KV store, its NIC limit and the cluster's weight epoch."""

from dualpath.storage.epoch import EpochFile, EpochState
from dualpath.storage.interface import Epochs, Store, Upkeep
from dualpath.storage.limiter import Limiter
from dualpath.storage.opening import (
    buffer_memory,
    open_epochs,
    open_store,
    open_upkeep,
    scan_stored,
    scratch_in_bucket,
)
from dualpath.storage.paths import scan_blocks
from dualpath.storage.store import BlockStore
from dualpath.storage.types import (
    BlockId,
    ReadStatus,
    StoreClosedError,
    StoreError,
    UnsupportedIoError,
    WriteStatus,
)

__all__ = [
    "BlockId",
    "BlockStore",
    "EpochFile",
    "EpochState",
    "Epochs",
    "Limiter",
    "ReadStatus",
    "Store",
    "StoreClosedError",
    "StoreError",
    "UnsupportedIoError",
    "Upkeep",
    "WriteStatus",
    "buffer_memory",
    "open_epochs",
    "open_store",
    "open_upkeep",
    "scan_blocks",
    "scan_stored",
    "scratch_in_bucket",
]
