"""A ring of USRBIO with memory for a batch: what ``io_usrbio`` hands from thread to thread."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dualpath.storage.blockio import Direction, IoOp
from dualpath.storage.limiter import remaining_s
from dualpath.storage.memory import address_of
from dualpath.storage.usrbio import Iov, Usrbio

log = logging.getLogger(__name__)

_COMPLAIN_AFTER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """One I/O of an operation: between a place in memory and a place in its file.

    Attributes:
        op: index of the operation.
        in_place: whether the memory is the caller's.
    """

    op: int
    fd: int
    iov: Iov
    address: int
    offset: int
    nbytes: int
    in_place: bool


class Lane:
    """A ring with memory for a batch. One thread at a time."""

    def __init__(
        self, library: Usrbio, mount: str, direction: Direction, blocks: int, block_bytes: int
    ) -> None:
        self._library = library
        self._direction = direction
        self._block_bytes = block_bytes
        self._iov = library.memory(mount, blocks * block_bytes, block_bytes)
        try:
            self._ring = library.ring(mount, 2 * blocks, for_read=direction is Direction.READ)
        except OSError:
            self._iov.close()
            raise
        self._view = self._iov.view()
        self._under_way = 0
        self._serial = 0

    def transfer(self, ops: Sequence[IoOp], deadline: float) -> list[int]:
        """Move everything; one errno an operation."""
        codes = [self._library.register(op.fd) for op in ops]
        known = [index for index, code in enumerate(codes) if not code]
        try:
            pieces = [piece for index in known for piece in self._pieces(index, ops[index])]
            if self._direction is Direction.WRITE:
                for index in known:
                    self._copy(index, ops[index], pieces)
            moved = self._run(len(ops), pieces, deadline)
        finally:
            for index in known:
                self._library.deregister(ops[index].fd)
        for index in known:
            codes[index] = self._code(ops[index], moved[index])
            if not codes[index] and self._direction is Direction.READ:
                self._copy(index, ops[index], pieces)
        return codes

    @property
    def idle(self) -> bool:
        """Whether nothing of it is under way; looks, and does not wait."""
        if self._under_way:
            self._under_way -= len(self._ring.wait(0, 0.0))
        return not self._under_way

    def close(self) -> None:
        """Give everything back. It must be idle."""
        self._ring.close()
        self._view.release()
        self._iov.close()

    def _pieces(self, index: int, op: IoOp) -> list[_Piece]:
        at = self._iov.address + index * self._block_bytes
        slot = address_of(op.slot)
        shared = self._library.iov_of(slot, op.slot.nbytes)
        if shared is None:
            return [_Piece(index, op.fd, self._iov, at, 0, op.total_bytes, False)]
        head = op.header.nbytes
        return [
            _Piece(index, op.fd, self._iov, at, 0, head, False),
            _Piece(index, op.fd, shared, slot, head, op.slot.nbytes, True),
        ]

    def _copy(self, index: int, op: IoOp, pieces: Sequence[_Piece]) -> None:
        """Between the lane's memory and header and slot, the latter unless used in place."""
        at = index * self._block_bytes
        views = [op.header]
        if not any(piece.op == index and piece.in_place for piece in pieces):
            views.append(op.slot)
        for view in views:
            ours = self._view[at : at + view.nbytes]
            if self._direction is Direction.WRITE:
                ours[:] = view
            else:
                view[:] = ours
            at += view.nbytes

    def _run(self, count: int, pieces: Sequence[_Piece], deadline: float) -> list[int | None]:
        """Bytes moved by each operation, or a negative errno; None: not over by ``deadline``."""
        moved: list[int | None] = [0] * count
        waiting = deque(pieces)
        flying: dict[int, _Piece] = {}
        try:
            self._drive(waiting, flying, moved, deadline)
        finally:
            self._under_way = len(flying)
        for piece in flying.values():
            moved[piece.op] = None
        return moved

    def _drive(
        self,
        waiting: deque[_Piece],
        flying: dict[int, _Piece],
        moved: list[int | None],
        deadline: float,
    ) -> None:
        """Queue and wait, until nothing of it is under way or it may be given up."""
        start_s = complained_s = time.monotonic()
        while waiting or flying:
            now = time.monotonic()
            late = now >= deadline
            if not late and waiting:
                self._prepare(waiting, flying, moved)
            if late:
                for piece in waiting:
                    moved[piece.op] = None
                waiting.clear()
                if not any(piece.in_place for piece in flying.values()):
                    break
                if now - complained_s > _COMPLAIN_AFTER_S:
                    complained_s = now
                    log.warning("3FS has not answered for %.0f s", now - start_s)
            if flying:
                end_s = now + _COMPLAIN_AFTER_S if late else deadline
                left_s = min(_COMPLAIN_AFTER_S, remaining_s(end_s, now))
                for number, result in self._ring.wait(1 if waiting else len(flying), left_s):
                    _land(flying.pop(number, None), result, moved)

    def _prepare(
        self, waiting: deque[_Piece], flying: dict[int, _Piece], moved: list[int | None]
    ) -> None:
        """Queue as much as the ring takes and tell the daemon."""
        while waiting:
            piece = waiting[0]
            self._serial += 1
            code = self._ring.prepare(
                piece.iov, piece.address, piece.fd, piece.offset, piece.nbytes, self._serial
            )
            if code == errno.EAGAIN and flying:
                break
            waiting.popleft()
            if code:
                _fail(moved, piece, code)
            else:
                flying[self._serial] = piece
        if flying and (code := self._ring.submit()):
            # The daemon also looks by itself: a hint that failed delays, and loses nothing.
            log.warning("hf3fs_submit_ios: %s", os.strerror(code))

    def _code(self, op: IoOp, moved: int | None) -> int:
        if moved is None:
            return errno.ETIMEDOUT
        if moved < 0:
            return -moved
        if moved == op.total_bytes:
            return 0
        return errno.ENODATA if self._direction is Direction.READ else errno.EIO


def _land(piece: _Piece | None, result: int, moved: list[int | None]) -> None:
    """Enter the result of one I/O."""
    if piece is None:
        return  # of an operation that was given up before
    before = moved[piece.op]
    if before is None or before < 0:
        return
    moved[piece.op] = result if result < 0 else before + result


def _fail(moved: list[int | None], piece: _Piece, code: int) -> None:
    if moved[piece.op] is not None:
        moved[piece.op] = -code
