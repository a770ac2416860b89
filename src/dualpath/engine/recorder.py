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


class LayerTimes(Protocol):
    """The layers of one step. vLLM's thread only."""

    def start(self) -> None:
        """A layer's attention begins."""
        ...

    def stop(self) -> None:
        """It has ended (been launched, on CUDA)."""
        ...

    def seconds(self) -> float | None:
        """Sum over the layers; None while the device still works on them. Never waits."""
        ...


class HostTimes:
    """Work is done when the call returns."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._sum_s = 0.0

    def start(self) -> None:
        """See ``LayerTimes.start``."""
        self._began_s = time.perf_counter()

    def stop(self) -> None:
        """See ``LayerTimes.stop``."""
        self._sum_s += time.perf_counter() - self._began_s

    def seconds(self) -> float | None:
        """See ``LayerTimes.seconds``."""
        return self._sum_s


class CudaTimes:
    """Events in the current stream; looking at them never makes the host wait for the device. Not
    run where this was written: there was no GPU."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._began: Any = None

    def start(self) -> None:
        """See ``LayerTimes.start``."""
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def stop(self) -> None:
        """See ``LayerTimes.stop``."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._pairs.append((self._began, ended))

    def seconds(self) -> float | None:
        """See ``LayerTimes.seconds``."""
        if self._pairs and not self._pairs[-1][1].query():
            return None
        return sum(float(began.elapsed_time(ended)) for began, ended in self._pairs) / 1e3


class AttentionRecorder:
    """Attention time of every step, and samples of steps with a single request.

    ``take`` and ``total_s`` are for the traffic thread, all else for vLLM's; a deque's append and
    popleft are atomic, and so is reading a float.
    """

    def __init__(self, times: type[HostTimes] | type[CudaTimes]) -> None:
        self._times = times
        self._now: LayerTimes = times()
        self._pair: tuple[int, int] | None = None
        self._running: deque[tuple[tuple[int, int] | None, LayerTimes]] = deque()
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=MAX_SAMPLES)
        self.total_s = 0.0

    def step(self, meta: StepMetadata) -> None:
        """A step begins."""
        self._pair = meta.single
        self._now = self._times()

    def layer_begins(self) -> None:
        """Right before a layer's attention."""
        self._now.start()

    def layer_ended(self) -> None:
        """Right after it."""
        self._now.stop()

    def step_ended(self) -> None:
        """All layers of the step are launched."""
        self._running.append((self._pair, self._now))
        self.collect()

    def collect(self) -> None:
        """Count the steps that the device has finished by now. Never waits."""
        while self._running:
            pair, times = self._running[0]
            seconds = times.seconds()
            if seconds is None:
                return
            self._running.popleft()
            self.total_s += seconds
            if pair is not None and seconds > 0:
                self._samples.append((*pair, seconds))

    def take(self) -> list[tuple[int, int, float]]:
        """``(cached, bsz, seconds)`` since the last call."""
        taken = []
        while self._samples:
            taken.append(self._samples.popleft())
        return taken


def recorder_for(device: str) -> AttentionRecorder:
    """A recorder for tensors on ``device`` (``cpu`` or ``cuda``)."""
    return AttentionRecorder(CudaTimes if device == "cuda" else HostTimes)
