"""The one interface of the copy engines: bytes between the device cache and host memory.

``host``, ``cuda`` and ``cnic`` implement it; ``copy_choice`` picks one. docs/copy-engines.md has
the whole picture.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from dualpath.transfer.descriptors import Descriptors

COPY_TIMEOUT_S: Final = 30.0
"""No submission of an engine's own buffers takes nearly so long; past it the device is stuck."""
_SPIN_S: Final = 100e-6
_NAP_S: Final = 50e-6
_LOOP_NAP_S: Final = 200e-6


class CopyFailed(RuntimeError):
    """A copy failed, or was not over in time and may still be going on. The engine is of no use
    any more, and the memory of the copy must not be given to anybody else."""


@dataclass(frozen=True, slots=True)
class Run:
    """``nbytes`` from ``source`` to ``target`` (addresses)."""

    source: int
    target: int
    nbytes: int


Runs = Sequence[Run] | Descriptors
"""What is copied: runs, or arrays with sources as ``local`` and targets as ``remote``."""


def merge_runs(runs: Sequence[Run]) -> list[Run]:
    """Join neighbours that are contiguous on both sides; order is kept."""
    merged: list[Run] = []
    for run in runs:
        if merged:
            last = merged[-1]
            if last.source + last.nbytes == run.source and last.target + last.nbytes == run.target:
                merged[-1] = Run(last.source, last.target, last.nbytes + run.nbytes)
                continue
        merged.append(run)
    return merged


def packed(runs: Runs) -> Descriptors:
    """Runs as arrays: ``local`` is the source, ``remote`` the target. Order has no meaning in a
    submission, so a list is sorted by target and neighbours are joined; ``Descriptors`` are taken
    as they stand, because whoever made them has done so once for all layers (``BlockMap``)."""
    if isinstance(runs, Descriptors):
        return runs
    return Descriptors(
        np.array([run.source for run in runs], dtype=np.uint64),
        np.array([run.target for run in runs], dtype=np.uint64),
        np.array([run.nbytes for run in runs], dtype=np.uint64),
    ).merged()


class Fence(Protocol):
    """A point in the order of the model's work on the device."""

    def reached(self) -> bool:
        """Whether all work before it is over. Never waits; any thread.

        Raises:
            CopyFailed: the device reports an error; nobody will ever know.
        """
        ...


class Copy(Fence, Protocol):
    """A submission under way. As a fence it is reached when every byte is at its target; asking
    is also what makes it go on, so somebody has to."""

    @property
    def nbytes(self) -> int:
        """Bytes in all runs together."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until every byte is at its target.

        Raises:
            CopyFailed: see there.
        """
        ...

    def before(self, stream: int) -> None:
        """Work put on the device's ``stream`` from now on runs after this copy. May wait where
        the device cannot be told.

        Raises:
            CopyFailed: see there.
        """
        ...


class CopyEngine(abc.ABC):
    """Copies runs between a device cache and host memory.

    ``submit``, ``copy`` and the copies' own methods are called from one thread at a time (the
    copy thread), a few times a layer. ``fence`` is called from the thread that launches the
    model's work. Either all runs of a submission arrive or ``CopyFailed`` is raised; nothing is
    ever tried twice.
    """

    name: str

    @abc.abstractmethod
    def fence(self, stream: int) -> Fence | None:
        """Mark the end of what was launched on the device's ``stream`` so far. None when the
        device is the CPU: what was launched is over then."""

    @abc.abstractmethod
    def submit(self, runs: Runs, after: Sequence[Fence] = ()) -> Copy:
        """Start one submission. It reads and writes nothing before every fence of ``after`` is
        reached. Never waits for the device, nor for a fence. Several may be under way; only
        ``after`` orders them (a copy is a fence).

        Raises:
            CopyFailed: see there.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Every submission must be over. Idempotent."""

    def copy(self, runs: Runs, after: Sequence[Fence] = ()) -> int:
        """Submit and wait; on return every byte is at its target, for any work launched from now
        on. Returns the bytes moved.

        Raises:
            CopyFailed: see there.
        """
        copy = self.submit(runs, after)
        copy.wait(COPY_TIMEOUT_S)
        return copy.nbytes


@dataclass(frozen=True, slots=True)
class Finished:
    """A copy that was over when ``submit`` returned."""

    nbytes: int

    def reached(self) -> bool:
        """Over."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Over."""

    def before(self, stream: int) -> None:
        """Over."""


async def until_reached(fence: Fence, timeout_s: float) -> None:
    """``wait_until`` for an event loop.

    Raises:
        CopyFailed: the device reports an error, or takes longer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not fence.reached():  # noqa: ASYNC110 - nobody is called when a GPU gets there
                await asyncio.sleep(_LOOP_NAP_S)
    except TimeoutError:
        raise CopyFailed(f"the model's work: not over after {timeout_s:g} s") from None


def wait_until(done: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll, at first without pause: most copies of a layer take tens of microseconds.

    Raises:
        CopyFailed: not ``done`` after ``timeout_s``.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise CopyFailed(f"{what}: not over after {timeout_s:g} s")
        if waited > _SPIN_S:
            time.sleep(_NAP_S)
