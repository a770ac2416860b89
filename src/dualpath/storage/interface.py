"""What a store offers, wherever its bytes lie: the contract of directories and buckets.

``tests/integration/test_store_contract.py`` holds every kind of store to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from dualpath.blocks import BlockLayout
from dualpath.storage.epoch import EpochState
from dualpath.storage.types import BlockId, ReadStatus, WriteStatus
from dualpath.storage.upkeep import Books, FsckReport, GcReport, RootStats


class Store(Protocol):
    """An open store of Full Blocks, shared by all engines of a cluster.

    Any number of threads may call, in any number of processes; calls block. Outcomes of single
    blocks come back as statuses; exceptions mean that the call itself was wrong. Slots belong to
    the store while a call lasts and are the caller's again, for good, when it returns: nothing
    reads or writes them afterwards, whatever the statuses say.

    Attributes:
        layout: geometry of the blocks.
        io_name: what moves the bytes: ``nixl``, ``threads``, ``usrbio`` or ``s3``.
        direct: whether no cache of this machine lies between.
        writable: False when blocks can only be read.
        capacity_bytes: most bytes in the store; 0 for no limit.
        evicts: whether blocks may go to make room, so that those in use must be pinned.
    """

    layout: BlockLayout
    io_name: str
    direct: bool
    writable: bool
    capacity_bytes: int
    evicts: bool

    def read(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[ReadStatus]:
        """Read ``blocks[i]`` into ``slots[i]`` and verify it; one status a block.

        A block that fails verification is removed and counted. A slot's content is meaningful
        only where the status is ``OK``.

        Args:
            root: namespace digest.
            slots: writable, page-aligned views of exactly ``layout.slot_bytes``.
            deadline: ``time.monotonic()`` after which no further batch is started.

        Raises:
            StoreClosedError: the store is closed.
            StoreError: the limiter's state file cannot be used any more.
            ValueError: a name or slot is unusable, or the counts differ.
        """

    def write(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        slots: Sequence[memoryview],
        deadline: float,
    ) -> list[WriteStatus]:
        """Store ``slots[i]`` as ``blocks[i]``, whole or not at all; one status a block.

        Publishing what is stored already is a success (``PRESENT``). The slots must not change
        while the call lasts. Where the store ``evicts``, room is made by taking away the least
        recently used blocks without children; ``take_evicted`` names them.

        Args, Raises: as ``read``.
        """

    def scan(self, root: bytes | None = None) -> Iterator[tuple[bytes, BlockId]]:
        """``(root, block)`` of every published block, or of one namespace, by listing.

        Raises:
            OSError: it cannot be listed.
        """

    def remove(self, root: bytes, block: BlockId) -> bool:
        """Take a block away; whether it was there.

        Raises:
            OSError: it is there and cannot be removed.
        """

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """Keep a block, and so its whole chain, from eviction, by any process, until ``unpin`` or
        the end of this process. It need not be there. Pins count.

        Raises:
            OSError: the capacity's books cannot be used before ``deadline``; nothing is pinned.
        """

    def unpin(self, root: bytes, key: bytes) -> None:
        """Undo one ``pin``."""

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """Keys, by root, of what this object has evicted since the last call."""

    def counters(self) -> dict[str, int]:
        """Monotonic totals of this open store; ``Counters`` lists the names."""

    def close(self) -> None:
        """Release everything. No call may be under way."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Epochs(Protocol):
    """The cluster's weight epoch, kept in the store. Any thread and process may call."""

    def read(self) -> EpochState:
        """The present state; epoch 0 when none was ever written.

        Raises:
            StoreError: it cannot be read, or is no epoch. Never taken for epoch 0: that would
                make old KV reachable again.
        """

    def advance(self, *, in_place: bool, timeout_s: float = 10.0) -> EpochState:
        """Add one to the epoch; durable when this returns. Two callers at once advance it twice.

        Raises:
            TimeoutError: others keep us from it for longer than ``timeout_s``.
            StoreError: it cannot be read or written; it may then have advanced or not, and
                calling again is safe.
        """


class Upkeep(Protocol):
    """Looks after a store beside running engines, or at rest. One thread at a time.

    Attributes:
        where: what people call the store.
    """

    where: str

    def scan(self) -> Iterator[tuple[bytes, BlockId]]:
        """``(root, block)`` of every published block, as a stream; a store that does not exist
        yet is empty.

        Raises:
            OSError: it cannot be listed.
        """

    def stats(self) -> dict[bytes, RootStats]:
        """Sizes by namespace, by listing: no block is opened.

        Raises:
            OSError: it cannot be listed.
        """

    def books(self) -> Books | None:
        """The capacity's account; None where nobody keeps one.

        Raises:
            OSError: it cannot be used, or is held by another process for too long.
        """

    def fsck(self, *, repair: bool = False) -> FsckReport:
        """Read every block and verify name, header, length and checksum; ``repair`` removes the
        bad ones.

        Raises:
            OSError: it cannot be listed, or a block cannot be read or removed.
        """

    def gc(self, target_bytes: int, *, min_age_s: float = 0.0) -> GcReport:
        """Remove blocks until at most ``target_bytes`` are left: unreachable ones first, then the
        least recently used leaf, again and again.

        Args:
            min_age_s: blocks used later than this long ago are kept, even above the target.

        Raises:
            OSError: it cannot be listed or a block not be removed.
        """

    def close(self) -> None:
        """Release everything."""
