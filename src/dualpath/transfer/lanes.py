"""What an agent knows about one peer: its queue, and the pieces under way."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.errors import TransferError
from dualpath.transfer.nixl_backend import Op
from dualpath.transfer.transfer import Transfer

WINDOW_PIECES: Final = 2
"""Pieces under way per peer: one on the wire while the next is being handed over."""
PROBE_S: Final = 0.05
"""How soon a peer that owes an answer is probed; doubled up to ``PROBE_MAX_S``."""
PROBE_MAX_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Piece:
    """Part of a transfer, or of several of one direction, under way as one request.

    Attributes:
        transfers: whose parts they are; each is in it once.
        parts: the ranges of each, kept where the peer may refuse them all for one.
        handle: NIXL's request; None when the peer was asked to write instead.
        number: of the ``Ask``; 0 for a request of NIXL's.
        error: why it failed, while it still may touch memory.
        over_at: monotonic time at which it counts as over; infinite while nobody can say.
        clean: whether it is over on the peer's side too, then.
    """

    transfers: tuple[Transfer, ...]
    nbytes: int
    parts: tuple[Descriptors, ...] = ()
    handle: Any = None
    number: int = 0
    error: TransferError | None = None
    over_at: float = math.inf
    clean: bool = False

    @property
    def op(self) -> Op:
        """Direction."""
        return self.transfers[0].op

    @property
    def given_up(self) -> bool:
        """Whether nobody wants its outcome any more."""
        return all(transfer.done.done() for transfer in self.transfers)

    def give_up(self, error: TransferError) -> None:
        """Fail all of it; it stays under way."""
        self.error = error
        for transfer in self.transfers:
            transfer.give_up(error)

    def over(self, error: TransferError | None) -> None:
        """Nothing of it touches memory any more."""
        for transfer in self.transfers:
            transfer._piece_over(error, clean=self.clean)


@dataclass(slots=True, eq=False)
class Peer:
    """A peer and its lane.

    Attributes:
        remote: NIXL's name for it while it is loaded there, else empty.
        broken: its connection broke; it must be loaded again.
        gone: it was removed, and stays until nothing is under way.
        probe_at, probe_every_s: when the next probe is due, and the spacing after that.
    """

    name: str
    metadata: bytes
    remote: str = ""
    broken: bool = False
    gone: bool = False
    queue: deque[Transfer] = field(default_factory=deque)
    pieces: list[Piece] = field(default_factory=list)
    probe_at: float = math.inf
    probe_every_s: float = PROBE_S

    @property
    def posted(self) -> bool:
        """Whether NIXL has requests of this peer under way."""
        return any(not piece.number for piece in self.pieces)

    @property
    def asked(self) -> list[Piece]:
        """Pieces that the peer owes an answer for."""
        return [piece for piece in self.pieces if piece.number and piece.over_at == math.inf]

    @property
    def may_post(self) -> bool:
        """Whether a piece of the queue could be started, as far as this peer goes."""
        return (
            bool(self.queue)
            and len(self.pieces) < WINDOW_PIECES
            and not (self.broken and self.posted)
        )

    def answered(self) -> None:
        """It lives: be quick again when it next falls silent."""
        self.probe_every_s = PROBE_S

    def expect_answer(self, now: float) -> None:
        """Probe it when no answer comes."""
        self.probe_at = min(self.probe_at, now + self.probe_every_s)

    def probed(self, now: float) -> None:
        """Space the probes out."""
        self.probe_every_s = min(2 * self.probe_every_s, PROBE_MAX_S)
        self.probe_at = now + self.probe_every_s
