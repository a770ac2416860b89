"""Copy engine ``cuda``: batched asynchronous copies by the GPU's copy engines.

Two streams of the least priority carry the copies, so that the model's work is not held up: one
into the cache, one out of it. An export waits for the layer that is being computed, and the next
layer's load must not stand behind it. Order against the model's streams is by events: a copy
starts after the fences it was given, and ``before`` makes a stream wait for it. The host asks by
``reached`` and ``wait``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from dualpath.transfer.copying import (
    Copy,
    CopyEngine,
    CopyFailed,
    Fence,
    Finished,
    Runs,
    packed,
    wait_until,
)
from dualpath.transfer.cuda_driver import CudaDriver, CudaError
from dualpath.transfer.descriptors import Descriptors

MAX_BATCH: Final = 4096
"""Copies in one call; a bound on how long the call can hold the driver's lock."""
_NOTHING: Final = Descriptors(*(np.empty(0, dtype=np.uint64) for _ in range(3)))


class _Events:
    """Events to use again. Making one takes the driver's lock; recording anew does not disturb
    those who were told to wait for an earlier recording."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._idle: deque[int] = deque()  # append and pop are atomic
        self._all: list[int] = []

    def record(self, stream: int) -> int:
        try:
            event = self._idle.pop()
        except IndexError:
            event = self._driver.create_event()
            self._all.append(event)
        self._driver.record(event, stream)
        return event

    def give_back(self, event: int) -> None:
        self._idle.append(event)

    def close(self) -> None:
        """Fences that are still about say nothing any more."""
        self._idle.clear()
        while self._all:
            self._driver.destroy_event(self._all.pop())


class CudaFence:
    """See ``Fence``: a recorded event."""

    __slots__ = ("_driver", "_events", "event")

    def __init__(self, driver: CudaDriver, events: _Events, stream: int) -> None:
        self._driver = driver
        self._events = events
        self.event = events.record(stream)

    def reached(self) -> bool:
        """See ``Fence``."""
        with _failures():
            return self._driver.reached(self.event)

    def __del__(self) -> None:
        # Nobody can ask about it any more. Streams that were told to wait still do.
        if hasattr(self, "event"):
            self._events.give_back(self.event)


class CudaCopy:
    """See ``Copy``: one event for each stream it went to."""

    __slots__ = ("_driver", "_waiting", "fences", "nbytes")

    def __init__(self, driver: CudaDriver, fences: Sequence[CudaFence], nbytes: int) -> None:
        self._driver = driver
        self._waiting = list(fences)
        self.fences = fences
        self.nbytes = nbytes

    def reached(self) -> bool:
        """See ``Copy``."""
        while self._waiting and self._waiting[0].reached():
            del self._waiting[0]
        return not self._waiting

    def wait(self, timeout_s: float) -> None:
        """See ``Copy``."""
        wait_until(self.reached, timeout_s, f"a copy of {self.nbytes} bytes on the GPU")

    def before(self, stream: int) -> None:
        """See ``Copy``; on the GPU, without waiting here."""
        with _failures():
            for fence in self.fences:
                self._driver.wait_event(stream, fence.event)


class CudaCopyEngine(CopyEngine):
    """See the module's text.

    Args:
        driver: CUDA.
        device: number of the GPU whose memory holds the cache.
        cache: ``(address, bytes)`` of the cache; what starts in it is an export.
        pinned: ``(address, bytes)`` of the host memory that copies start or end in.

    Raises:
        CudaError: the memory cannot be locked, or there is no such GPU.
    """

    name = "cuda"

    def __init__(
        self,
        driver: CudaDriver,
        device: int,
        cache: Sequence[tuple[int, int]] = (),
        pinned: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._driver = driver
        self._device = device
        self._cache = sorted(cache)
        self._pinned: list[int] = []
        self._streams: list[int] = []
        self._context = driver.retain_primary(device)
        self._events = _Events(driver)
        try:
            self._enter()
            for address, nbytes in pinned:
                driver.pin(address, nbytes)
                self._pinned.append(address)
            for _ in range(2):
                self._streams.append(driver.create_stream())
        except CudaError:
            with contextlib.suppress(CudaError):  # the first one says what is wrong
                self.close()
            raise

    def _enter(self) -> None:
        """The context belongs to the thread, and this engine is used from two."""
        if self._driver.current_context() != self._context:
            self._driver.use_context(self._context)

    def fence(self, stream: int) -> Fence | None:
        """See ``CopyEngine``."""
        with _failures():
            self._enter()
            return CudaFence(self._driver, self._events, stream)

    def submit(self, runs: Runs, after: Sequence[Fence] = ()) -> Copy:
        """See ``CopyEngine``.

        Raises:
            CopyFailed: also for a fence that is not CUDA's own and not reached: streams cannot
                wait for it.
        """
        if not len(runs):
            return Finished(0)
        ranges = packed(runs)
        events = [event for fence in after for event in _events_of(fence)]
        with _failures():
            self._enter()
            fences = []
            for stream, part in zip(self._streams, self._directions(ranges), strict=True):
                if len(part):
                    for event in events:
                        self._driver.wait_event(stream, event)
                    self._queue(part, stream)
                    fences.append(CudaFence(self._driver, self._events, stream))
        return CudaCopy(self._driver, fences, ranges.nbytes)

    def _directions(self, ranges: Descriptors) -> tuple[Descriptors, Descriptors]:
        """What goes into the cache, and what comes out of it."""
        out = np.zeros(len(ranges), dtype=bool)
        for address, nbytes in self._cache:
            out |= (ranges.local >= address) & (ranges.local < address + nbytes)
        if not out.any():
            return ranges, _NOTHING
        if out.all():
            return _NOTHING, ranges
        return (
            Descriptors(ranges.local[~out], ranges.remote[~out], ranges.sizes[~out]),
            Descriptors(ranges.local[out], ranges.remote[out], ranges.sizes[out]),
        )

    def _queue(self, ranges: Descriptors, stream: int) -> None:
        if not self._driver.batches:
            for source, target, nbytes in zip(
                ranges.local.tolist(), ranges.remote.tolist(), ranges.sizes.tolist(), strict=True
            ):
                self._driver.copy(target, source, nbytes, stream)
            return
        for low in range(0, len(ranges), MAX_BATCH):
            part = slice(low, low + MAX_BATCH)
            self._driver.copy_batch(
                ranges.remote[part], ranges.local[part], ranges.sizes[part], stream
            )

    def close(self) -> None:
        """See ``CopyEngine``."""
        if not self._context:
            return
        try:
            self._enter()
            while self._streams:
                self._driver.destroy_stream(self._streams.pop())
            self._events.close()
            while self._pinned:
                self._driver.unpin(self._pinned.pop())
        finally:
            self._context = 0
            self._driver.release_primary(self._device)


def _events_of(fence: Fence) -> list[int]:
    if isinstance(fence, CudaFence):
        return [fence.event]
    if isinstance(fence, CudaCopy):
        return [part.event for part in fence.fences]
    if not fence.reached():
        raise CopyFailed(f"a stream cannot wait for {type(fence).__name__}")
    return []


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise CopyFailed(str(error)) from error
