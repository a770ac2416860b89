"""Blocks of a preempted answer on their way back: store -> DE buffer.

vLLM preempts an answer when its cache is full: the answer loses its cache blocks and starts again
from token 0. Its complete blocks were persisted as they came, so they are read back and only the
tail behind them is computed again. The room for them is asked for anew, because the buffer was
given back when the answer began; a preempted answer holds no cache, so whoever holds the buffer
meanwhile can finish without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.storage import BlockId
from dualpath.transfer.services import Services
from dualpath.transfer.slots import Lease


class Restores:
    """What one session has read back, by vLLM's request. Belongs to the traffic thread.

    Args:
        owner: who holds the room, for people to read.
        root: namespace of the session's blocks.
    """

    def __init__(self, services: Services, owner: str, root: bytes) -> None:
        self._services = services
        self._owner = owner
        self._root = root
        self._leases: dict[str, Lease] = {}

    async def read(self, request_id: str, blocks: Sequence[BlockId]) -> int:
        """Bring leading blocks of an answer into the buffer; they stay until ``release``. The
        caller sets the deadline.

        Returns:
            How many there are; reading stops at the first that is not stored (or not good).

        Raises:
            PoolTooSmall, PoolTimeout: there was no room; nothing is held.
        """
        self.release(request_id)
        if not blocks:
            return 0
        services = self._services
        lease = await services.buffer.pool.allocate(
            self._owner, len(blocks), services.timeouts.admission
        )
        good = 0
        try:
            good = await services.read_blocks(self._root, blocks, lease, lease.slots)
        finally:
            # Also when cancelled: slots that the store still writes to drain first.
            lease.release(lease.slots[good:])
        if good:
            self._leases[request_id] = lease
        return good

    def lease(self, request_id: str) -> Lease | None:
        """The slots with an answer's blocks, in order; None when nothing was read back."""
        return self._leases.get(request_id)

    def release(self, request_id: str) -> None:
        """Give an answer's room back; idempotent."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            lease.release()

    def release_all(self) -> None:
        """Give all room back."""
        for request_id in list(self._leases):
            self.release(request_id)
