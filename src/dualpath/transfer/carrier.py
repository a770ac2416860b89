"""Hands pieces of transfers to the NIC and finds out what became of them.

No waiting and no event loop in here: ``work`` does what can be done now and returns.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dualpath.transfer.errors import PeerLost, TransferError, TransferFailed
from dualpath.transfer.nixl_backend import NixlEndpoint, Op, State
from dualpath.transfer.pacer import Pacer
from dualpath.transfer.transfer import Transfer

logger = logging.getLogger(__name__)

WINDOW_PIECES: Final = 2
"""Pieces under way per peer: one on the wire while the next is being handed over."""
_AFTERLIFE_POLLS: Final = 3
"""Rounds of progress after a connection broke before its requests count as over."""


@dataclass(slots=True, eq=False)
class _Piece:
    transfer: Transfer
    handle: Any
    nbytes: int
    afterlife: int = 0
    error: TransferError | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    metadata: bytes
    remote: str = ""
    """NIXL's name for it while it is loaded there, else empty."""
    broken: bool = False
    queue: deque[Transfer] = field(default_factory=deque)
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def may_post(self) -> bool:
        return (
            bool(self.queue)
            and len(self.pieces) < WINDOW_PIECES
            and not (self.broken and self.pieces)
        )


class Carrier:
    """The transfers of one agent, by peer.

    Peers take turns, and a peer's transfers take turns, piece by piece; each peer has its own
    window of pieces under way. So a huge transfer does not hold up a small one, and a peer that
    has stopped holds up nobody else.

    Args:
        endpoint: the NIXL agent.
        pacers: the NIC's two directions.
        counts: where to count pieces, bytes and lost connections.

    Thread safety: none; one owner.
    """

    def __init__(
        self, endpoint: NixlEndpoint, pacers: Mapping[Op, Pacer], counts: Counter[str]
    ) -> None:
        self._endpoint = endpoint
        self._pacers = pacers
        self._counts = counts
        self._peers: dict[str, _Peer] = {}
        self._leaving: list[_Peer] = []
        self.last_event_s = -math.inf
        """Monotonic time at which a piece was last posted or found to be over."""

    # ---- peers and transfers ------------------------------------------------------------------

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make a peer known in place of one of that name."""
        self.remove_peer(name)
        self._peers[name] = _Peer(name, metadata)

    def remove_peer(self, name: str) -> None:
        """Fail a peer's transfers and forget it once all its pieces are over."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._leaving.append(peer)
        for transfer in {piece.transfer for piece in peer.pieces} | set(peer.queue):
            transfer.give_up(PeerLost(f"{name} was removed"))

    def enqueue(self, transfer: Transfer) -> bool:
        """Queue a transfer; False when its peer is not known."""
        peer = self._peers.get(transfer.peer)
        if peer is None:
            return False
        peer.queue.append(transfer)
        return True

    def withdraw(self, transfer: Transfer) -> None:
        """Take a transfer that was given up out of its peer's queue."""
        for peer in self._all():
            if transfer in peer.queue:
                peer.queue.remove(transfer)

    def unsettled(self) -> set[Transfer]:
        """Transfers queued or under way."""
        return {
            transfer
            for peer in self._all()
            for transfer in itertools.chain(peer.queue, (piece.transfer for piece in peer.pieces))
        }

    @property
    def busy(self) -> bool:
        """Whether pieces are under way."""
        return any(peer.pieces for peer in self._all())

    def post_in_s(self, now: float) -> float:
        """Seconds until the rate limit lets a queued piece go; infinite when none is ready."""
        waits = (
            self._pacers[peer.queue[0].op].wait_s(now)
            for peer in self._peers.values()
            if peer.may_post
        )
        return min(waits, default=math.inf)

    def close(self, error: TransferError) -> None:
        """Destroy the endpoint, then settle what was still under way: only now it is over."""
        for peer in self._all():
            for piece in peer.pieces:
                # NIXL accepts this for a request under way, and UCX goes on with it unseen: fine
                # only here, because the agent goes next, which it cannot while handles exist.
                self._endpoint.release(piece.handle)
                piece.handle = None
        self._endpoint.close()
        for peer in self._all():
            for piece in peer.pieces:
                piece.transfer._piece_over(piece.error or error, clean=False)
            peer.pieces.clear()
        self._peers.clear()
        self._leaving.clear()

    def _all(self) -> Iterator[_Peer]:
        return itertools.chain(self._peers.values(), self._leaving)

    # ---- work ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Serve peers, look after what is under way, post what may be posted."""
        self._endpoint.progress()
        self._check_pieces()
        self._post_pieces()
        for peer in [peer for peer in self._leaving if not peer.pieces]:
            self._leaving.remove(peer)
            self._unload(peer)

    def _post_pieces(self) -> None:
        """Hand over one piece of each peer's next transfer, in turn, while there is room."""
        progress = True
        while progress:
            progress = False
            for peer in list(self._peers.values()):
                if not peer.may_post:
                    continue
                pacer = self._pacers[peer.queue[0].op]
                if pacer.wait_s(time.monotonic()) > 0 or not self._connect(peer):
                    continue
                progress = True
                self._post(peer, peer.queue.popleft(), pacer)

    def _connect(self, peer: _Peer) -> bool:
        """Load the peer in NIXL, again if its connection broke and all it carried is over."""
        if peer.broken:
            if peer.pieces:
                return False
            self._unload(peer)
        if not peer.remote:
            try:
                peer.remote = self._endpoint.add(peer.metadata)
            except PeerLost as error:
                for transfer in list(peer.queue):
                    transfer.give_up(PeerLost(f"{peer.name}: {error}"))
                return False
        return True

    def _post(self, peer: _Peer, transfer: Transfer, pacer: Pacer) -> None:
        ranges = transfer._next_piece()
        try:
            handle = self._endpoint.prepare(transfer.op, peer.remote, ranges)
        except (PeerLost, TransferFailed) as error:
            if isinstance(error, PeerLost):
                self._note_lost(peer)
            transfer._piece_over(error, clean=True)  # it was never started
            return
        pacer.take(ranges.nbytes, time.monotonic())
        self._counts["pieces"] += 1
        self.last_event_s = time.monotonic()
        piece = _Piece(transfer, handle, ranges.nbytes)
        peer.pieces.append(piece)
        if transfer._waiting:
            peer.queue.append(transfer)  # at the end: the peer's other transfers are next
        self._judge(peer, piece, self._endpoint.post(handle))

    def _check_pieces(self) -> None:
        for peer in self._all():
            for piece in list(peer.pieces):
                if piece.error is None:
                    self._judge(peer, piece, self._endpoint.check(piece.handle))
                elif piece.afterlife:
                    piece.afterlife -= 1
                    if not piece.afterlife:
                        self._over(peer, piece, clean=False)

    def _judge(self, peer: _Peer, piece: _Piece, state: State) -> None:
        transfer = piece.transfer
        if state is State.ACTIVE:
            return
        self.last_event_s = time.monotonic()
        if state is State.DONE:
            self._counts[f"{transfer.op.value.lower()}_bytes"] += piece.nbytes
            self._over(peer, piece, clean=True)
        elif state is State.LOST:
            piece.error = PeerLost(f"the connection to {peer.name} broke")
            piece.afterlife = _AFTERLIFE_POLLS
            self._note_lost(peer)
            transfer.give_up(piece.error)
        else:
            # Nobody knows whether its other ranges are still being carried out, so the memory
            # stays owned until this agent is closed.
            piece.error = TransferFailed(f"{transfer.op.value}, {peer.name}: NIXL gave it up")
            self._counts["pieces_of_unknown_fate"] += 1
            logger.error("%s; its memory stays reserved", piece.error)
            transfer.give_up(piece.error)

    def _over(self, peer: _Peer, piece: _Piece, *, clean: bool) -> None:
        peer.pieces.remove(piece)
        self._endpoint.release(piece.handle)
        piece.transfer._piece_over(piece.error, clean=clean)

    def _note_lost(self, peer: _Peer) -> None:
        if not peer.broken:
            peer.broken = True
            self._counts["connections_lost"] += 1
            logger.warning("%s: the connection to %s broke", self._endpoint.name, peer.name)

    def _unload(self, peer: _Peer) -> None:
        if peer.remote:
            self._endpoint.remove(peer.remote)
        peer.remote, peer.broken = "", False
