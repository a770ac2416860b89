"""A GPU as far as copies are concerned: streams that run behind the host's back, in any order that
streams and events allow. Its memory is this process's own."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dualpath.transfer.cuda_driver import CudaError
from dualpath.transfer.descriptors import U64


@dataclass
class SimulatedGpu:
    """Implements ``CudaDriver``. Work runs when ``advance`` or ``reached`` is called, one piece of
    a stream drawn by ``seed`` at a time.

    Attributes:
        calls: how often each call was made.
        batch_sizes: copies in each ``copy_batch``.
        fail: name of a call that fails from now on.
        frozen: nothing runs any more.
    """

    seed: int = 0
    batches: bool = True
    calls: Counter[str] = field(default_factory=Counter)
    batch_sizes: list[int] = field(default_factory=list)
    fail: str = ""
    frozen: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._numbers = iter(range(1, 1 << 30))
        self._streams: dict[int, deque[tuple[str, Callable[[], bool]]]] = {}
        self._recorded: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.contexts: Counter[int] = Counter()
        self._entered = threading.local()

    # ---- CudaDriver ---------------------------------------------------------------------------

    def current_context(self) -> int:
        return getattr(self._entered, "context", 0)

    def retain_primary(self, device: int) -> int:
        self._called("retain_primary", anywhere=True)
        self.contexts[device] += 1
        return 1000 + device

    def release_primary(self, device: int) -> None:
        self._called("release_primary", anywhere=True)
        self.contexts[device] -= 1

    def use_context(self, context: int) -> None:
        self._called("use_context", anywhere=True)
        self._entered.context = context

    def create_stream(self) -> int:
        self._called("create_stream")
        stream = next(self._numbers)
        self._streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._called("destroy_stream")
        del self._streams[stream]

    def create_event(self) -> int:
        self._called("create_event")
        event = next(self._numbers)
        self._recorded[event] = self._reached[event] = 0
        return event

    def destroy_event(self, event: int) -> None:
        self._called("destroy_event")
        del self._recorded[event], self._reached[event]

    def record(self, event: int, stream: int) -> None:
        self._called("record")
        self._recorded[event] += 1
        recording = self._recorded[event]

        def reach() -> bool:
            self._reached[event] = max(self._reached[event], recording)
            return True

        self._streams[stream].append(("record", reach))

    def wait_event(self, stream: int, event: int) -> None:
        self._called("wait_event")
        recording = self._recorded[event]
        self._streams[stream].append(("wait", lambda: self._reached[event] >= recording))

    def reached(self, event: int) -> bool:
        self._called("reached")
        self.advance(1)
        return self._reached[event] >= self._recorded[event]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._called("copy")
        self._streams[stream].append(("copy", lambda: _move(target, source, nbytes)))

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        self._called("copy_batch")
        assert self.batches
        assert len(targets) == len(sources) == len(sizes)
        copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self.batch_sizes.append(len(copies))
        self._random.shuffle(copies)  # within a batch there is no order

        def run() -> bool:
            return all(_move(*copy) for copy in copies)

        self._streams[stream].append(("batch", run))

    def pin(self, address: int, nbytes: int) -> None:
        self._called("pin")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        self._called("unpin")
        del self.pinned[address]

    # ---- for tests ----------------------------------------------------------------------------

    def launch(
        self, stream: int, kernel: Callable[[], None], over: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue the model's work, which ends when ``over`` says so."""

        def run() -> bool:
            if not over():
                return False
            kernel()
            return True

        self._streams[stream].append(("kernel", run))

    def advance(self, pieces: int) -> None:
        """Run up to so many pieces of work."""
        for _ in range(0 if self.frozen else pieces):
            heads = [queue for queue in self._streams.values() if queue]
            if not heads:
                return
            queue = self._random.choice(heads)
            if queue[0][1]():
                queue.popleft()

    def held(self) -> tuple[int, int, int, int]:
        """Streams, events, pinned ranges and contexts that were not given back."""
        retained = sum(self.contexts.values())
        return len(self._streams), len(self._recorded), len(self.pinned), retained

    def _called(self, name: str, *, anywhere: bool = False) -> None:
        self.calls[name] += 1
        if not anywhere and not self.current_context():
            raise CudaError(f"{name}: this thread has no context (201)")
        if self.fail == name:
            raise CudaError(f"{name}: injected (999)")


def _move(target: int, source: int, nbytes: int) -> bool:
    ctypes.memmove(target, source, nbytes)
    return True
