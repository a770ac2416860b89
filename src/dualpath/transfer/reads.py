"""Reads that the owner of the memory carries out as writes.

Over TCP, UCX has no real READ: the owner answers each request with messages, and when the reader
dies before the owner has looked at its requests, UCX aborts the owner's process. A WRITE has no
such flaw, and is cheaper. So a reader sends an ``Ask`` and the owner writes the bytes to it, then
sends an ``Answer``; on the reader's side that is a READ like any other.

The reader's memory may be written until the owner has answered. A reader that has given up sends
``Withdraw`` and still waits for the answer, which comes at once or when what the owner had already
handed to its NIC is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Self

import msgspec
import numpy as np

from dualpath.transfer.descriptors import Descriptors, descriptors
from dualpath.transfer.errors import PeerLost, TransferTimeout
from dualpath.transfer.transfer import Transfer

logger = logging.getLogger(__name__)

MAX_RANGES: Final = 128
"""Ranges in one Ask: it must fit one TCP message of UCX (8 KiB), so that none can overtake it."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Write your ``source`` ranges to my ``target`` addresses (little-endian uint64 arrays).

    ``number`` is the reader's, and never used twice in its life."""

    number: int
    source: bytes
    target: bytes
    sizes: bytes

    @classmethod
    def of(cls, number: int, ranges: Descriptors) -> Self:
        """Pack ranges as the reader sees them."""
        return cls(
            number,
            source=ranges.remote.astype("<u8").tobytes(),
            target=ranges.local.astype("<u8").tobytes(),
            sizes=ranges.sizes.astype("<u8").tobytes(),
        )

    def ranges(self) -> Descriptors:
        """Unpack them as the owner sees them.

        Raises:
            ValueError: not three arrays of one length, or not addresses and sizes.
        """
        columns = [np.frombuffer(part, "<u8") for part in (self.source, self.target, self.sizes)]
        return descriptors(columns[0], columns[1], columns[2])


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Nothing of that Ask touches your memory any more; your bytes are there unless ``error``."""

    number: int
    error: str = ""


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """I have given that Ask up: do not start it, and answer once it is over."""

    number: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Asks nothing: sending it shows whether the connection still stands."""


Message = Ask | Answer | Withdraw | Probe

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Wire form."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """From the wire.

    Raises:
        msgspec.MsgspecError: not one of these messages.
    """
    return _decoder.decode(data)


class ReadServer:
    """The owner's side.

    Args:
        write: queue a WRITE of ranges to a peer.
        answer: send an answer to a peer. It may get lost with the connection; a reader that
            gets none withdraws, which is answered anew.
    """

    def __init__(
        self,
        write: Callable[[str, Descriptors], Transfer],
        answer: Callable[[str, Answer], None],
    ) -> None:
        self._write = write
        self._answer = answer
        self._serving: dict[tuple[str, int], Transfer] = {}
        # Perhaps withdrawn before it was asked: the two came over different connections. Mostly
        # it had just been answered; such entries stay until the peer is forgotten.
        self._withdrawn: set[tuple[str, int]] = set()

    def ask(self, peer: str, ask: Ask) -> None:
        """Serve a request, unless it has been withdrawn."""
        key = (peer, ask.number)
        if key in self._withdrawn:
            self._withdrawn.remove(key)
            return
        try:
            ranges = ask.ranges()
        except ValueError as error:
            self._answer(peer, Answer(ask.number, f"not a request: {error}"))
            return
        transfer = self._write(peer, ranges)
        self._serving[key] = transfer
        transfer.settled.add_done_callback(lambda _: self._settled(key, transfer))

    def withdraw(self, peer: str, number: int) -> None:
        """Give a request up. The answer follows when it is over."""
        transfer = self._serving.get((peer, number))
        if transfer is not None:
            transfer.give_up(TransferTimeout(f"{peer} has withdrawn its request"))
        else:
            self._withdrawn.add((peer, number))
            self._answer(peer, Answer(number, "not under way"))

    def forget(self, peer: str) -> None:
        """The peer is gone: nobody waits for its answers."""
        self._withdrawn = {key for key in self._withdrawn if key[0] != peer}

    def _settled(self, key: tuple[str, int], transfer: Transfer) -> None:
        del self._serving[key]
        error = transfer.done.exception() if transfer.done.done() else None
        if isinstance(error, PeerLost):
            return  # it is dead, or will withdraw over a new connection
        self._answer(key[0], Answer(key[1], str(error) if error else ""))
