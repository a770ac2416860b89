"""Copy engine ``cnic``: every byte into or out of the GPU is an RDMA write of its own NIC.

A NIXL agent writes to itself: UCX connects the NIC's queue pair to the same NIC, which reads one
side over PCIe and writes the other. So the NIC's arbiter sees host-device copies beside all other
traffic and gives the model's its right of way, which a GPU's copy engine cannot.

The NIC knows nothing of CUDA's streams: a submission is posted when its fences are reached, and the
model's work may be launched when it is over.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dualpath.transfer.copying import (
    COPY_TIMEOUT_S,
    Copy,
    CopyEngine,
    CopyFailed,
    Fence,
    Finished,
    Runs,
    packed,
    wait_until,
)
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.errors import AgentSetupError, TransferError
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import NixlEndpoint, Op, State, UcxSettings

REQUEST_RANGES: Final = 1024
REQUEST_BYTES: Final = 32 << 20
WINDOW: Final = 2
"""Requests at the NIC: one is written while the next is handed over."""
RDMA_TRANSPORTS: Final = "rc,cuda_copy"
"""``rc`` moves the bytes. ``cuda_copy`` only tells UCX which addresses are the GPU's: it cannot
carry a connection that notices failures, and NIXL asks for nothing else."""
_ENVIRONMENT: Final = threading.Lock()


@dataclass(slots=True)
class LoopbackCounts:
    """What a cnic engine has done: submissions of its callers, requests to NIXL, work requests
    (ranges after merging) and bytes of completed requests."""

    submissions: int = 0
    requests: int = 0
    ranges: int = 0
    moved_bytes: int = 0


class _Loopback:
    """See ``Copy``: requests posted and to be posted, in order."""

    def __init__(
        self, engine: CnicCopyEngine, parts: Sequence[Descriptors], after: Sequence[Fence]
    ) -> None:
        self._engine = engine
        self._after = list(after)
        self._waiting = deque(parts)
        self._posted: list[tuple[Any, Descriptors]] = []
        self.nbytes = sum(part.nbytes for part in parts)

    def reached(self) -> bool:
        """See ``Copy``: do what can be done now."""
        while self._after:
            if not self._after[0].reached():
                return False
            del self._after[0]
        for entry in list(self._posted):
            if self._engine._over(*entry):
                self._posted.remove(entry)
        while self._waiting and len(self._posted) < WINDOW:
            entry = self._engine._post(self._waiting.popleft())
            if not self._engine._over(*entry, fresh=True):
                self._posted.append(entry)
        return not self._posted and not self._waiting

    def wait(self, timeout_s: float) -> None:
        """See ``Copy``."""
        try:
            wait_until(
                self.reached, timeout_s, f"{self.nbytes} bytes through {self._engine.endpoint}"
            )
        except CopyFailed:
            self._engine._broken = True
            raise

    def before(self, stream: int) -> None:
        """See ``Copy``: waits here, because a stream cannot wait for a NIC."""
        self.wait(COPY_TIMEOUT_S)


@dataclass(slots=True)
class _Posting:
    """State of a request between post and release."""

    handle: Any
    state: State = field(default=State.ACTIVE)


class CnicCopyEngine(CopyEngine):
    """See the module's text. One thread at a time, but for ``fence``.

    Args:
        name: of the agent; unique in the cluster and per start.
        settings: the NIC, as for transfers between engines. With an RDMA device its transports
            are replaced by what a loop needs.
        regions: all memory that copies start or end in; the cache's with its ``device``.
        fence: marks the end of the model's work on a stream; None when nothing is ever launched
            ahead (the cache is host memory).
        on_close: called once, by ``close``.

    Raises:
        NixlMissing, AgentSetupError: see ``NixlEndpoint``.
    """

    name = "cnic"

    def __init__(
        self,
        name: str,
        settings: UcxSettings,
        regions: Sequence[Region],
        fence: Callable[[int], Fence | None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._on_close = on_close
        self.endpoint = f"{name} on {settings.device or 'any NIC'}"
        self.counts = LoopbackCounts()
        self._name = name
        self._fence = fence
        self._broken = False
        with _transports(RDMA_TRANSPORTS if settings.rdma and not settings.transports else ""):
            self._endpoint = NixlEndpoint(name, settings)
        self._closed = False
        try:
            for region in regions:
                self._endpoint.register(region)
        except AgentSetupError:
            self._endpoint.close()
            raise
        ordered = sorted(regions, key=lambda region: region.address)
        self._starts = np.array([region.address for region in ordered], dtype=np.uint64)
        self._ends = self._starts + np.array([region.nbytes for region in ordered], np.uint64)
        # NIXL takes one kind of memory a side in a request; -1 is the host's.
        self._devices = np.array(
            [-1 if region.device is None else region.device for region in ordered], np.int64
        )

    def fence(self, stream: int) -> Fence | None:
        """See ``CopyEngine``."""
        return self._fence(stream) if self._fence is not None else None

    def submit(self, runs: Runs, after: Sequence[Fence] = ()) -> Copy:
        """See ``CopyEngine``."""
        if self._closed or self._broken:
            raise CopyFailed(f"{self.endpoint} was closed, or has failed before")
        if not len(runs):
            return Finished(0)
        copy = _Loopback(self, list(self._requests(packed(runs))), after)
        self.counts.submissions += 1
        copy.reached()
        return copy

    def _requests(self, ranges: Descriptors) -> Iterator[Descriptors]:
        """Cut by memory kinds of both sides, then by size. Usually that is one request."""
        sources, targets = self._kinds(ranges.local, ranges), self._kinds(ranges.remote, ranges)
        pairs = np.unique(np.stack((sources, targets)), axis=1).T
        for source, target in pairs:
            chosen = (sources == source) & (targets == target)
            part = Descriptors(ranges.local[chosen], ranges.remote[chosen], ranges.sizes[chosen])
            yield from part.pieces(REQUEST_BYTES, REQUEST_RANGES)

    def _kinds(self, addresses: Any, ranges: Descriptors) -> Any:
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (index < 0) | (addresses + ranges.sizes > self._ends[index])
        if outside.any():
            bad = int(np.flatnonzero(outside)[0])
            raise CopyFailed(
                f"{int(ranges.sizes[bad])} bytes at {int(addresses[bad]):#x} are in no region "
                f"of {self.endpoint}"
            )
        return self._devices[index]

    def _post(self, ranges: Descriptors) -> tuple[_Posting, Descriptors]:
        try:
            posting = _Posting(self._endpoint.prepare(Op.WRITE, self._name, ranges))
        except TransferError as error:
            self._broken = True
            raise CopyFailed(f"{self.endpoint}: {error}") from error
        self.counts.requests += 1
        self.counts.ranges += len(ranges)
        posting.state = self._endpoint.post(posting.handle)
        return posting, ranges

    def _over(self, posting: _Posting, ranges: Descriptors, *, fresh: bool = False) -> bool:
        if not fresh:
            posting.state = self._endpoint.check(posting.handle)
        if posting.state is State.ACTIVE:
            return False
        if posting.state is not State.DONE:
            # The request may still be under way: its handle must not be released.
            self._broken = True
            raise CopyFailed(f"{self.endpoint}: a request is {posting.state.value}")
        self._endpoint.release(posting.handle)
        self.counts.moved_bytes += ranges.nbytes
        return True

    def close(self) -> None:
        """See ``CopyEngine``."""
        if not self._closed:
            self._closed = True
            self._endpoint.close()
            if self._on_close is not None:
                self._on_close()


@contextlib.contextmanager
def _transports(names: str) -> Iterator[None]:
    """UCX takes a list of transports from the environment only: NIXL's own text for settings ends
    values at commas, and gives way to the environment."""
    if not names:
        yield
        return
    with _ENVIRONMENT:
        before = os.environ.get("UCX_TLS")
        os.environ["UCX_TLS"] = names
        try:
            yield
        finally:
            if before is None:
                del os.environ["UCX_TLS"]
            else:
                os.environ["UCX_TLS"] = before
