"""Hands pieces of transfers to the NIC and finds out what became of them.

No waiting and no timers in here: ``work`` does what can be done now and returns.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.errors import PeerLost, TransferError, TransferFailed
from dualpath.transfer.lanes import Peer, Piece
from dualpath.transfer.nixl_backend import NixlEndpoint, Op, State
from dualpath.transfer.pacer import Pacer
from dualpath.transfer.reads import (
    MAX_RANGES,
    Answer,
    Ask,
    Message,
    Probe,
    ReadServer,
    Withdraw,
    decode,
    encode,
)
from dualpath.transfer.transfer import Transfer

logger = logging.getLogger(__name__)

_AFTERLIFE_S: Final = 0.01
"""After a connection broke, or an answer came over another one: time to take in what this
machine had received before."""
_LAST_WORDS_S: Final = 0.25
"""The same for a peer that is gone and can answer nothing any more."""


class Carrier:
    """The transfers of one agent, by peer.

    Peers take turns, and a peer's transfers take turns, piece by piece; each peer has its own
    window of pieces under way. So a huge transfer does not hold up a small one, and a peer that
    has stopped holds up nobody else. What small transfers of one direction wait in a row goes out
    as one piece, because a request costs as much as many of its ranges.

    Args:
        endpoint: the NIXL agent.
        pacers: the NIC's two directions.
        counts: where to count pieces, bytes and lost connections.
        piece_bytes: most bytes in a piece.

    Thread safety: none; one owner, in a running event loop.
    """

    def __init__(
        self,
        endpoint: NixlEndpoint,
        pacers: Mapping[Op, Pacer],
        counts: Counter[str],
        piece_bytes: int,
    ) -> None:
        self._endpoint = endpoint
        self._pacers = pacers
        self._counts = counts
        self._piece_bytes = piece_bytes
        self._peers: dict[str, Peer] = {}
        self._leaving: list[Peer] = []
        self._numbers = itertools.count(1)
        self._server = ReadServer(self._serve, self._answer)
        self._closed: TransferError | None = None
        self._post_at = math.inf
        self.last_event_s = -math.inf
        """Monotonic time at which a piece was last started or found to be over."""

    # ---- peers and transfers ------------------------------------------------------------------

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make a peer known in place of one of that name."""
        self.remove_peer(name)
        self._peers[name] = Peer(name, metadata)

    def remove_peer(self, name: str) -> None:
        """Fail a peer's transfers and forget it once all its pieces are over."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.gone = True
        peer.probe_at = -math.inf
        self._leaving.append(peer)
        self._server.forget(name)
        under_way = {transfer for piece in peer.pieces for transfer in piece.transfers}
        for transfer in under_way | set(peer.queue):
            transfer.give_up(PeerLost(f"{name} was removed"))

    def submit(self, op: Op, peer: str, ranges: Descriptors) -> Transfer:
        """Queue a transfer. For a peer that is not known, and after ``close``, it has failed
        already."""
        asks = op is Op.READ and not self._endpoint.native_reads
        pieces = ranges.pieces(self._piece_bytes, MAX_RANGES if asks else len(ranges))
        transfer = Transfer(op, peer, ranges.nbytes, deque(pieces), self._withdraw)
        entry = self._peers.get(peer)
        if self._closed is not None:
            transfer.give_up(self._closed)
        elif entry is None:
            transfer.give_up(PeerLost(f"{peer} is not known to {self._endpoint.name}"))
        else:
            entry.queue.append(transfer)
        return transfer

    def unsettled(self) -> set[Transfer]:
        """Transfers queued or under way, those on behalf of readers included."""
        return {
            transfer
            for peer in self._all()
            for transfer in itertools.chain(peer.queue, *(piece.transfers for piece in peer.pieces))
        }

    @property
    def busy(self) -> bool:
        """Whether pieces are under way."""
        return any(peer.pieces for peer in self._all())

    def post_in_s(self, now: float) -> float:
        """Seconds until the rate limit lets the next piece go; infinite when none waits for it."""
        return max(0.0, self._post_at - now)

    def close(self, error: TransferError) -> None:
        """Destroy the endpoint, then settle what was still under way: only now it is over."""
        self._closed = error
        for peer in self._all():
            for piece in peer.pieces:
                if piece.handle is not None:
                    # NIXL accepts this for a request under way, and UCX goes on with it unseen:
                    # fine only here, because the agent, which the handle refers to, goes next.
                    self._endpoint.release(piece.handle)
                    piece.handle = None
        self._endpoint.close()
        for peer in self._all():
            for piece in peer.pieces:
                piece.clean = False
                piece.over(piece.error or error)
            peer.pieces.clear()
        self._peers.clear()
        self._leaving.clear()

    def _all(self) -> Iterator[Peer]:
        return itertools.chain(self._peers.values(), self._leaving)

    def _withdraw(self, transfer: Transfer) -> None:
        """A transfer was given up: start nothing more of it, and say so to a peer that serves
        it."""
        for peer in self._all():
            if transfer in peer.queue:
                peer.queue.remove(transfer)
            if not peer.broken:
                for piece in peer.asked:
                    if transfer in piece.transfers and piece.given_up:
                        self._send(peer, Withdraw(piece.number))

    # ---- work ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Serve peers, look after what is under way, start what may be started."""
        for sender, data in self._endpoint.progress():
            self._receive(sender, data)
        now = time.monotonic()
        for peer in self._all():
            self._check(peer, now)
        self._post_pieces()
        for peer in [peer for peer in self._leaving if not peer.pieces]:
            self._leaving.remove(peer)
            self._unload(peer)

    def _post_pieces(self) -> None:
        """Start one piece of each peer's next transfer, in turn, while there is room."""
        progress = True
        while progress:
            progress = False
            self._post_at = math.inf
            for peer in list(self._peers.values()):
                if not peer.may_post:
                    continue
                pacer = self._pacers[peer.queue[0].op]
                now = time.monotonic()
                if (wait_s := pacer.wait_s(now)) > 0:
                    self._post_at = min(self._post_at, now + wait_s)
                elif self._load(peer):
                    progress = True
                    self._post(peer, self._group(peer), pacer)

    def _load(self, peer: Peer) -> bool:
        """Load the peer in NIXL, again if its connection broke and NIXL carries nothing of it.
        Fails its queue when that cannot be done."""
        if peer.broken:
            if peer.posted:
                return False
            self._unload(peer)
        if peer.remote:
            return True
        for old in self._leaving:  # NIXL knows one agent of a name at a time
            if old.remote == peer.name:
                if not old.broken or old.posted:
                    return False
                self._unload(old)
                old.broken = True
        try:
            peer.remote = self._endpoint.add(peer.metadata)
            if peer.remote != peer.name:
                raise PeerLost(f"this is the metadata of {peer.remote}")
        except PeerLost as error:
            peer.broken = True
            for transfer in list(peer.queue):
                transfer.give_up(PeerLost(f"{peer.name}: {error}"))
            return False
        return True

    def _group(self, peer: Peer) -> list[Transfer]:
        """Take the first transfer of the queue, and those behind it whose next pieces fit into one
        with its own."""
        group = [peer.queue.popleft()]
        first = group[0]._look_at_piece()
        nbytes, ranges = first.nbytes, len(first)
        while peer.queue and peer.queue[0].op is group[0].op:
            piece = peer.queue[0]._look_at_piece()
            nbytes += piece.nbytes
            ranges += len(piece)
            if nbytes > self._piece_bytes or ranges > MAX_RANGES:
                break
            group.append(peer.queue.popleft())
        return group

    def _post(self, peer: Peer, group: list[Transfer], pacer: Pacer) -> None:
        parts = [transfer._next_piece() for transfer in group]
        for transfer in group:
            if transfer._waiting:
                peer.queue.append(transfer)  # at the end: the peer's other transfers are next
        self._start(peer, group, parts, pacer)

    def _start(
        self, peer: Peer, group: list[Transfer], parts: list[Descriptors], pacer: Pacer
    ) -> None:
        ranges = Descriptors.joined(parts)
        asks = group[0].op is Op.READ and not self._endpoint.native_reads
        number = next(self._numbers) if asks else 0
        piece = Piece(tuple(group), ranges.nbytes, tuple(parts) if asks else (), number=number)
        if not asks:
            try:
                piece.handle = self._endpoint.prepare(piece.op, peer.remote, ranges)
            except (PeerLost, TransferFailed) as error:
                if isinstance(error, PeerLost):
                    self._note_lost(peer)
                elif len(group) > 1:  # what is wrong with one is not the others' fault
                    for transfer, part in zip(group, parts, strict=True):
                        self._start(peer, [transfer], [part], pacer)
                    return
                piece.clean = True  # it was never started
                piece.error = error
                self._end(peer, piece)
                return
        now = time.monotonic()
        pacer.take(ranges.nbytes, now)
        self._counts["pieces"] += 1
        self.last_event_s = now
        peer.pieces.append(piece)
        if asks:
            peer.expect_answer(now)
            self._send(peer, Ask.of(piece.number, ranges))
        else:
            self._judge(peer, piece, self._endpoint.post(piece.handle))

    def _check(self, peer: Peer, now: float) -> None:
        for piece in list(peer.pieces):
            if now >= piece.over_at:
                self._over(peer, piece)
            elif piece.handle is not None and piece.error is None:
                self._judge(peer, piece, self._endpoint.check(piece.handle))
        asked = peer.asked
        if not asked:
            peer.probe_at = math.inf
        elif peer.gone and peer.broken:
            # It can answer no more, and whoever removed it knows that its process has ended.
            for piece in asked:
                piece.over_at = now + _LAST_WORDS_S
        elif now >= peer.probe_at:
            peer.probed(now)
            if peer.gone or self._load(peer):
                for piece in asked:
                    self._send(peer, Withdraw(piece.number) if piece.given_up else Probe())

    def _judge(self, peer: Peer, piece: Piece, state: State) -> None:
        if state is State.ACTIVE:
            return
        self.last_event_s = time.monotonic()
        if state is State.DONE:
            self._counts[f"{piece.op.value.lower()}_bytes"] += piece.nbytes
            piece.clean = True
            self._over(peer, piece)
        elif state is State.LOST:
            piece.error = PeerLost(f"the connection to {peer.name} broke")
            piece.over_at = self.last_event_s + _AFTERLIFE_S
            self._note_lost(peer)
            piece.give_up(piece.error)
        else:
            # Nobody knows whether its other ranges are still being carried out, so the memory
            # stays owned until this agent is closed.
            error = TransferFailed(f"{piece.op.value}, {peer.name}: NIXL gave it up")
            self._counts["pieces_of_unknown_fate"] += 1
            logger.error("%s; its memory stays reserved", error)
            piece.give_up(error)

    def _over(self, peer: Peer, piece: Piece) -> None:
        peer.pieces.remove(piece)
        if piece.handle is not None:
            self._endpoint.release(piece.handle)
        self._end(peer, piece)

    def _end(self, peer: Peer, piece: Piece) -> None:
        if piece.error is not None:
            # They fail with this piece, and what was still to come of them must not be started.
            for transfer in piece.transfers:
                if transfer in peer.queue:
                    peer.queue.remove(transfer)
        piece.over(piece.error)

    def _note_lost(self, peer: Peer) -> None:
        if peer.broken:
            return
        peer.broken = True
        self._counts["connections_lost"] += 1
        logger.warning("%s: the connection to %s broke", self._endpoint.name, peer.name)
        for piece in peer.asked:
            # The peer may still be writing: the piece stays until it says otherwise.
            piece.give_up(PeerLost(f"the connection to {peer.name} broke"))

    def _unload(self, peer: Peer) -> None:
        if peer.remote:
            self._endpoint.remove(peer.remote)
        peer.remote, peer.broken = "", False

    # ---- messages, see ``reads`` --------------------------------------------------------------

    def _send(self, peer: Peer, message: Message) -> None:
        if self._endpoint.notify(peer.remote, encode(message)) is State.LOST:
            self._note_lost(peer)

    def _receive(self, sender: str, data: bytes) -> None:
        peer = self._peers.get(sender) or next(
            (peer for peer in self._leaving if peer.name == sender), None
        )
        try:
            message = decode(data)
        except msgspec.MsgspecError as error:
            logger.warning("%s: not a message of %s: %s", self._endpoint.name, sender, error)
            return
        if peer is None:
            # Nobody has told us how to reach it: its own deadline must end its wait.
            self._counts["messages_from_strangers"] += 1
            return
        match message:
            case Ask() if not peer.gone:
                self._counts["reads_served"] += 1
                self._server.ask(sender, message)
            case Withdraw():
                self._server.withdraw(sender, message.number)
            case Answer():
                self._answered(peer, message)

    def _serve(self, name: str, ranges: Descriptors) -> Transfer:
        return self.submit(Op.WRITE, name, ranges)

    def _answer(self, name: str, answer: Answer) -> None:
        peer = self._peers.get(name)
        if peer is not None and self._load(peer):
            self._send(peer, answer)

    def _answered(self, peer: Peer, answer: Answer) -> None:
        peer.answered()
        piece = next((piece for piece in peer.asked if piece.number == answer.number), None)
        if piece is None:
            return  # the second answer, to a withdrawal that came too late
        self.last_event_s = time.monotonic()
        piece.clean = True
        if piece.error is not None:  # the bytes may have come over the connection that broke
            piece.over_at = self.last_event_s + _AFTERLIFE_S
            return
        if answer.error and len(piece.transfers) > 1:
            self._ask_one_by_one(peer, piece)
            return
        if answer.error:
            piece.error = TransferFailed(f"{peer.name} did not serve a read: {answer.error}")
        else:
            self._counts["read_bytes"] += piece.nbytes
        self._over(peer, piece)

    def _ask_one_by_one(self, peer: Peer, piece: Piece) -> None:
        """The peer serves none of a group: what is wrong with one is not the others' fault."""
        peer.pieces.remove(piece)
        for transfer, part in zip(piece.transfers, piece.parts, strict=True):
            if transfer.done.done():
                transfer._piece_over(None, clean=True)
            else:
                self._start(peer, [transfer], [part], self._pacers[Op.READ])
