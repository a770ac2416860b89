"""The persistent KV store, its NIC limit and the cluster's weight epoch."""

from dualpath.storage.epoch import EpochFile, EpochState
from dualpath.storage.limiter import Limiter
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
    "Limiter",
    "ReadStatus",
    "StoreClosedError",
    "StoreError",
    "UnsupportedIoError",
    "WriteStatus",
    "scan_blocks",
]
