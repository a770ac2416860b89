"""When the model computed, and when it stood still for KV (loading that computing did not hide)."""

from __future__ import annotations

import time
from typing import Final

from dualpath.spans import Spans

_SHOWN_S: Final = 20e-6
"""Shorter waits are a look at a counter."""


class LayerWaits:
    """Seconds waited before each layer since the start, and the timeline of both. Written by vLLM's
    thread; reading is safe from anywhere (a float at a time).

    Args:
        spans: where computing and waiting are drawn.
    """

    def __init__(self, layers: int, spans: Spans | None = None) -> None:
        self.seconds = [0.0] * layers
        self.total_s = 0.0
        self._spans = spans
        self._taken_us = 0
        self._began_s = 0.0

    def waited(self, layer: int, started_s: float) -> None:
        """The model waited before ``layer`` since ``started_s`` and begins it now."""
        now_s = self._began_s = time.monotonic()
        self.seconds[layer] += now_s - started_s
        self.total_s += now_s - started_s
        if self._spans is not None and now_s - started_s > _SHOWN_S:
            self._spans.span("waiting", f"for layer {layer}", started_s, now_s)

    def computed(self, layer: int) -> None:
        """The model has computed ``layer`` (launched it, on a GPU)."""
        if self._spans is not None and self._began_s:
            self._spans.span("computing", f"layer {layer}", self._began_s, time.monotonic())

    def take_us(self) -> int:
        """Microseconds added since the last call."""
        total_us = int(self.total_s * 1e6)
        taken, self._taken_us = total_us - self._taken_us, total_us
        return taken
