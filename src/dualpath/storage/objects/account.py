"""What a store in a bucket asks and tells its account; and the one that keeps none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from dualpath.storage.types import BlockId, WriteStatus


@dataclass(slots=True)
class ObjectTicket:
    """Leave to send some blocks.

    Attributes:
        statuses: one a block; None: send it.
        granted_bytes: reserved for them.
        arrived: root, block and size of what is in the bucket now, or may be.
        uncertain: not all of ``arrived`` is sure.
    """

    statuses: list[WriteStatus | None]
    granted_bytes: int = 0
    arrived: list[tuple[bytes, BlockId, int]] = field(default_factory=list)
    uncertain: bool = False

    def published(self, root: bytes, block: BlockId, size_bytes: int, *, sure: bool = True) -> None:
        """A block is in the bucket; or, not ``sure``, it may be."""
        self.arrived.append((root, block, size_bytes))
        self.uncertain |= not sure


class BlockAccount(Protocol):
    """Room in a bucket. Any thread may call, in any of the processes that share it."""

    capacity_bytes: int
    """Most bytes in the store; 0 for no limit."""

    def admit(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        statuses: Sequence[WriteStatus | None],
        file_bytes: int,
        deadline: float,
    ) -> AbstractContextManager[ObjectTicket]:
        """Leave to send those blocks whose status is None, while the context lasts.

        Nobody evicts the blocks or their parents meanwhile. Never raises for lack of room or a
        server that refuses: that is in the ticket's statuses.
        """

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``Store.pin``."""

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``Store.unpin``."""

    def used(self, root: bytes, blocks: Sequence[BlockId]) -> None:
        """Note that blocks were read now. Asks nobody."""

    def gone(self, root: bytes, block: BlockId) -> None:
        """A block was removed by somebody who did not claim it."""

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``Store.take_evicted``."""

    def leave(self) -> None:
        """Take no part any more."""


class NoAccount:
    """Room without a limit: asks nobody and keeps no account."""

    capacity_bytes = 0

    @contextmanager
    def admit(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        statuses: Sequence[WriteStatus | None],
        file_bytes: int,
        deadline: float,
    ) -> Iterator[ObjectTicket]:
        """See ``BlockAccount``."""
        del root, blocks, file_bytes, deadline
        yield ObjectTicket(list(statuses))

    def pin(self, root: bytes, key: bytes, deadline: float) -> None:
        """See ``BlockAccount``. Nothing is evicted here."""

    def unpin(self, root: bytes, key: bytes) -> None:
        """See ``BlockAccount``."""

    def used(self, root: bytes, blocks: Sequence[BlockId]) -> None:
        """See ``BlockAccount``."""

    def gone(self, root: bytes, block: BlockId) -> None:
        """See ``BlockAccount``."""

    def take_evicted(self) -> dict[bytes, list[bytes]]:
        """See ``BlockAccount``."""
        return {}

    def leave(self) -> None:
        """See ``BlockAccount``."""
