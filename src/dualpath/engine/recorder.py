"""Measures what attention costs on a PE: the time between the two hooks around each layer.

vLLM calls ``wait_for_layer_load`` right before and ``save_kv_layer`` right after a layer's
attention. Their distance, summed over the layers of a step, is the step's attention time: on CPU by
the clock, on CUDA by events in the stream, because the host runs ahead of the device there.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final, Protocol

import torch

from dualpath.engine.metadata import StepMetadata

MAX_SAMPLES: Final = 256
"""Samples kept until a report takes them; older ones are dropped first."""


class LayerClock(Protocol):
    """Times intervals. vLLM's thread only."""

    def start(self) -> None:
        """A layer's attention begins."""
        ...

    def stop(self) -> None:
        """It has ended (been launched, on CUDA)."""
        ...

    def take_s(self) -> float:
        """Sum of the intervals since the last call, in seconds; waits for them to end."""
        ...


class HostClock:
    """Work is done when the call returns."""

    def __init__(self) -> None:
        self._began = 0.0
        self._sum_s = 0.0

    def start(self) -> None:
        """See ``LayerClock.start``."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """See ``LayerClock.stop``."""
        self._sum_s += time.perf_counter() - self._began

    def take_s(self) -> float:
        """See ``LayerClock.take_s``."""
        total, self._sum_s = self._sum_s, 0.0
        return total


class CudaClock:
    """Events in the current stream. Not run where this was written: there was no GPU."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._began: Any = None

    def start(self) -> None:
        """See ``LayerClock.start``."""
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def stop(self) -> None:
        """See ``LayerClock.stop``."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._pairs.append((self._began, ended))

    def take_s(self) -> float:
        """See ``LayerClock.take_s``."""
        pairs, self._pairs = self._pairs, []
        if pairs:
            pairs[-1][1].synchronize()
        return sum(float(began.elapsed_time(ended)) for began, ended in pairs) / 1e3


class AttentionRecorder:
    """Attention time of every step, and samples of steps with a single request.

    ``step``, ``layer_begins`` and ``layer_ended`` are called by vLLM's thread, ``take`` by the
    traffic thread; a deque's append and popleft are atomic.
    """

    def __init__(self, clock: LayerClock) -> None:
        self._clock = clock
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=MAX_SAMPLES)
        self._pair: tuple[int, int] | None = None
        self.total_s = 0.0

    def step(self, meta: StepMetadata) -> None:
        """A step begins."""
        self._pair = meta.single

    def layer_begins(self) -> None:
        """Right before a layer's attention."""
        self._clock.start()

    def layer_ended(self) -> None:
        """Right after it."""
        self._clock.stop()

    def step_ended(self) -> None:
        """All layers of the step are launched."""
        seconds = self._clock.take_s()
        self.total_s += seconds
        if self._pair is not None and seconds > 0:
            self._samples.append((*self._pair, seconds))
        self._pair = None

    def take(self) -> list[tuple[int, int, float]]:
        """``(cached, bsz, seconds)`` since the last call."""
        taken = []
        while self._samples:
            taken.append(self._samples.popleft())
        return taken


def recorder_for(device: str) -> AttentionRecorder:
    """A recorder for tensors on ``device`` (``cpu`` or ``cuda``)."""
    return AttentionRecorder(CudaClock() if device == "cuda" else HostClock())
