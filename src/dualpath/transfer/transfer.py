"""One submission to a peer, as its submitter sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.errors import TransferError, TransferTimeout
from dualpath.transfer.nixl_backend import Op


class Transfer:
    """Bytes on their way. Made by ``PeerAgent.submit``; belongs to the agent's event loop.

    Two things end, and not at the same time:

    ``done``: the outcome is known: a result when every byte is at its destination, else an
    exception (``TransferTimeout``, ``PeerLost``, ``TransferFailed``, ``AgentClosed``).

    ``settled``: nothing of this transfer touches memory any more. A transfer given up after its
    deadline is done long before it is settled, because a request handed to the NIC cannot be
    called back. Memory on both sides keeps its owner until ``settled``. It is True when every
    request was answered or never started. It is False when the connection broke under it: this
    side is over then, and nothing more is sent, but bytes that had reached the peer's machine
    are still applied when the peer next serves its connections; see ``PeerAgent.drain``. A READ
    from a peer that cannot be reached is settled when the peer says so after it is reached again,
    or after ``PeerAgent.remove_peer``.

    ``settled`` is set before ``done``, or long after it, never between ``done`` and the waiter.
    """

    __slots__ = (
        "_broken", "_posted", "_waiting", "_withdraw", "done", "nbytes", "op", "peer", "settled",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        peer: str,
        nbytes: int,
        pieces: deque[Descriptors],
        withdraw: Callable[[Transfer], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.op = op
        self.peer = peer
        self.nbytes = nbytes
        self.done: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[bool] = loop.create_future()
        self._waiting = pieces
        self._posted = 0
        self._broken = False
        self._withdraw = withdraw
        # The outcome may be of no interest to anybody (a session that is closing).
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def wait(self, timeout_s: float) -> None:
        """Wait for ``done``. When it does not come in time, or the waiting task is cancelled,
        the transfer is given up: what was not handed to the NIC yet never will be.

        Raises:
            TransferTimeout: not done within ``timeout_s`` seconds.
            PeerLost, TransferFailed, AgentClosed: it failed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.done)
        except TimeoutError:
            error = TransferTimeout(
                f"{self.op.value} of {self.nbytes} bytes, {self.peer}: not done in {timeout_s:g} s"
            )
            self.give_up(error)
            raise error from None
        except asyncio.CancelledError:
            self.give_up(TransferTimeout(f"{self.op.value}, {self.peer}: the waiter was cancelled"))
            raise

    def give_up(self, error: TransferError) -> None:
        """Fail with ``error`` unless done already; no further piece is posted. Idempotent."""
        if not self.done.done():
            self._fail(error)
            self._withdraw(self)

    # ---- for the agent ------------------------------------------------------------------------

    def _look_at_piece(self) -> Descriptors:
        return self._waiting[0]

    def _next_piece(self) -> Descriptors:
        self._posted += 1
        return self._waiting.popleft()

    def _piece_over(self, error: TransferError | None, *, clean: bool) -> None:
        """A posted piece is over; ``clean`` when it also is so on the peer's side."""
        self._posted -= 1
        if not clean:
            self._broken = True
        if error is not None:
            self._fail(error)
        else:
            self._settle()

    def _fail(self, error: TransferError) -> None:
        self._waiting.clear()
        failed = not self.done.done()
        # ``settled`` before ``done``: whoever waits for ``done`` finds the memory's state known.
        self._settle(succeeded=False)
        if failed:
            self.done.set_exception(error)

    def _settle(self, *, succeeded: bool = True) -> None:
        if self._posted or self._waiting or self.settled.done():
            return
        self.settled.set_result(not self._broken)
        if succeeded and not self.done.done():
            self.done.set_result(None)
