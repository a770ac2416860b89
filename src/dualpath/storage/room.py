"""Who may put bytes into a store: asked before a block is written, told of what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dualpath.storage.books import Entry
from dualpath.storage.paths import block_path
from dualpath.storage.types import BlockId, WriteStatus

SETTLE_S: Final = 5.0
"""How long one waits for the books where the caller has no deadline of its own to give."""


@dataclass(slots=True)
class Ticket:
    """Leave to write some blocks.

    Attributes:
        statuses: one a block: ``PRESENT``, or why it may not be written; None: write it.
        left_bytes: reserved and not yet turned into published files.
    """

    statuses: list[WriteStatus | None]
    left_bytes: int = 0


@dataclass(slots=True)
class Changes:
    """Names that appeared and vanished while nobody else could change any."""

    entries: list[Entry] = field(default_factory=list)
    converted_bytes: int = 0
    count_anew: bool = False

    def published(self, root: bytes, block: BlockId, size_bytes: int, ticket: Ticket) -> None:
        """A file got its name, on the strength of ``ticket``."""
        self.entries.append(Entry(True, root, block, size_bytes))
        ticket.left_bytes -= size_bytes
        self.converted_bytes += size_bytes

    def removed(self, root: bytes, block: BlockId, size_bytes: int) -> None:
        """A file of this size lost its name."""
        self.entries.append(Entry(False, root, block, size_bytes))

    def uncertain(self) -> None:
        """The sizes are not what the books say, for example after damage: count the store."""
        self.count_anew = True


class Room(Protocol):
    """Room in a store. Any thread may call, in any of the processes that share the store."""

    capacity_bytes: int
    """Most bytes in the store; 0 for no limit."""
    evicts: bool
    """Whether blocks may go to make room, and pins are kept."""

    @contextmanager
    def admit(
        self, root: bytes, blocks: Sequence[BlockId], file_bytes: int, deadline: float
    ) -> Iterator[Ticket]:
        """Leave to write those blocks that are absent, for as long as the context lasts.

        Nothing removes the blocks or their parents meanwhile. What is left of the ticket is given
        back at the end, so private files must be gone by then. Never raises for lack of room or
        for a disk that refuses: that is in the statuses.
        """

    @contextmanager
    def changing(self, deadline: float) -> Iterator[Changes]:
        """Publish or remove files inside; nobody else does meanwhile.

        Raises:
            TimeoutError: others hold the books for longer than ``deadline``; nothing was changed.
            OSError: the books cannot be used.
        """

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """Keep a block, and so its whole chain, from eviction until ``unpin``. Counts.

        Raises:
            OSError: as ``changing``; the block is not pinned.
        """

    def unpin(self, root: bytes, key: bytes) -> None:
        """Undo one ``pin``."""

    def make_room(self, wanted_bytes: int, deadline: float) -> int:
        """Evict so much, or what may go, because the disk itself is full; the bytes evicted.

        Raises:
            OSError: as ``changing``.
        """

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """Keys by root that were evicted through this object since the last call."""

    def close(self) -> None:
        """Let go. No call may be under way or follow."""


class Unlimited:
    """Room without a limit: asks nobody and keeps no account."""

    capacity_bytes = 0
    evicts = False

    def __init__(self, store: Path) -> None:
        self._store = store

    @contextmanager
    def admit(
        self, root: bytes, blocks: Sequence[BlockId], file_bytes: int, deadline: float
    ) -> Iterator[Ticket]:
        """See ``Room``."""
        del deadline
        yield Ticket(statuses_now(self._store, root, blocks, file_bytes))

    @contextmanager
    def changing(self, deadline: float) -> Iterator[Changes]:
        """See ``Room``."""
        del deadline
        yield Changes()

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``Room``. Nothing is evicted here."""

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``Room``."""

    def make_room(self, wanted_bytes: int, deadline: float) -> int:
        """See ``Room``. Nothing is evicted here."""
        del wanted_bytes, deadline
        return 0

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``Room``."""
        return {}

    def close(self) -> None:
        """See ``Room``."""


def statuses_now(
    store: Path, root: bytes, blocks: Sequence[BlockId], file_bytes: int
) -> list[WriteStatus | None]:
    """``PRESENT`` for each block that is stored with the right length, None for the others."""
    statuses: list[WriteStatus | None] = []
    for block in blocks:
        try:
            size = block_path(store, root, block).stat().st_size
        except OSError:
            size = -1  # absent, or whatever it is will show when it is written
        statuses.append(WriteStatus.PRESENT if size == file_bytes else None)
    return statuses


def settle_deadline() -> float:
    """Deadline for changes that belong to no call with a deadline."""
    return time.monotonic() + SETTLE_S
