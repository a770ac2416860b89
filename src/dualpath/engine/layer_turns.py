"""vLLM's side of layers that take turns: what a step says to, and awaits of, ``Regions``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dualpath.transfer.copying import Fence
from dualpath.transfer.manager import EngineFailing, TrafficManager
from dualpath.transfer.regions import Regions


class LayerTurns:
    """Calls of one engine's steps, in order: ``begin_step``; then for each layer
    ``await_region``, (the model computes), ``export_begins`` of each request, ``computed``.
    vLLM's thread only.

    Args:
        fence: marks the end of what the model has launched; None where nothing is under way when
            a call returns.
    """

    def __init__(
        self, manager: TrafficManager, regions: Regions, fence: Callable[[], Fence | None]
    ) -> None:
        self._manager = manager
        self._regions = regions
        self._fence = fence

    def begin_step(self) -> None:
        """A step begins."""
        self._manager.call(self._regions.begin_step)

    def await_region(self, layer: int, timeout_s: float) -> None:
        """Wait until whatever the region of ``layer`` held is copied out.

        Raises:
            EngineFailing: it is not after ``timeout_s``: going on would destroy KV, and a copy
                inside a machine that takes so long will not end.
        """
        if not self._regions.wait_exported(layer, timeout_s):
            raise EngineFailing(
                f"the KV in the region of layer {layer} was not copied out within {timeout_s:g} s"
            )

    def export_begins(self, layer: int) -> None:
        """A request's ``push_layer`` is about to be asked for."""
        self._regions.export_begins(layer)

    def computed(self, layer: int) -> None:
        """The model has computed (or launched) the layer and all its exports were begun."""
        self._manager.call(partial(self._regions.computed, layer, self._fence()))


def stream_of(device: torch.device) -> Callable[[], int]:
    """What gives the stream the model is being launched on; 0 on CPU, which has none."""
    if device.type != "cuda":
        return lambda: 0
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
