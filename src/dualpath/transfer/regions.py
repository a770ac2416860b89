"""Layers that take turns in an engine's memory, and when a region may be written.

A PE holds the KV of R layers instead of all of them: layer ``k`` lies in region ``k % R``. A region
passes through the same four hands for ever: *restored* (the KV that tokens computed earlier left
behind is put back), *computed* (the model adds that of new tokens and reads all of it), *exported*
(the new KV is copied to host memory), free. Whoever writes into a region before it was exported
destroys KV that exists nowhere else, and nothing would notice but a wrong token. So two rules:

* a restore of layer ``k`` waits until layer ``k - R`` is computed and exported;
* the model begins layer ``k`` (it writes new KV at once) only when the region's last export is over
  and the restores of every request in the batch have arrived.

vLLM's thread and the traffic thread share the counters of exports under way (``DeviceUse``, thread
safe); everything else here belongs to the traffic thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from dualpath.transfer.copying import Fence
from dualpath.transfer.loads import DeviceUse

_STALE: Final = "the step of this load is over"


class StaleStep(RuntimeError):
    """A restore belongs to a step that has ended."""


class Regions:
    """Ledger of R regions that n layers share.

    Args:
        layers: layers of the model.
        regions: R; at least 2, because a layer is restored while another is computed.
    """

    def __init__(self, layers: int, regions: int) -> None:
        if not 2 <= regions <= layers:
            raise ValueError(f"{layers} layers cannot share {regions} regions")
        self.layers = layers
        self.count = regions
        self.exports = tuple(DeviceUse() for _ in range(regions))
        self._step = 0
        self._computed = 0
        self._fences: list[Fence | None] = [None] * regions
        self._waiting: set[asyncio.Future[None]] = set()

    def region_of(self, layer: int) -> int:
        """Where a layer lies."""
        return layer % self.count

    # ---- vLLM's thread -----------------------------------------------------------------------

    def export_begins(self, layer: int) -> None:
        """An export of ``layer`` will be asked for; end it with ``export_over``."""
        self.exports[self.region_of(layer)].enter()

    def wait_exported(self, layer: int, timeout_s: float) -> bool:
        """Block until nothing is being copied out of the region of ``layer``; False when that
        takes longer than ``timeout_s``."""
        return self.exports[self.region_of(layer)].wait_idle(timeout_s)

    # ---- traffic thread ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self._step

    def begin_step(self) -> None:
        """A step begins: all layers of the one before are computed."""
        self._step += 1
        self._computed = 0
        self._wake()

    def computed(self, layer: int, fence: Fence | None) -> None:
        """``layer`` of the current step is computed, or launched when there is a ``fence``. Its
        exports were counted before."""
        self._computed = layer + 1
        self._fences[self.region_of(layer)] = fence
        self._wake()

    def export_over(self, layer: int) -> None:
        """An export has read its last byte, or will not read any."""
        self.exports[self.region_of(layer)].leave()
        self._wake()

    def fences(self, layer: int) -> Sequence[Fence]:
        """What a copy from or to the region of ``layer`` has to wait for on the device."""
        fence = self._fences[self.region_of(layer)]
        return () if fence is None else (fence,)

    def may_fill(self, layer: int) -> bool:
        """Whether the KV of ``layer`` may be put into its region in the current step."""
        before = layer - self.count
        return self._computed > before and self.exports[self.region_of(layer)].idle

    async def until_free(self, step: int, layer: int) -> None:
        """Wait until ``layer`` may be restored for ``step``. Has no deadline of its own: vLLM's
        thread waits for the layer with one, and the next step ends it.

        Raises:
            StaleStep: the step is over.
        """
        while True:
            if self._step != step:
                raise StaleStep(_STALE)
            if self.may_fill(layer):
                return
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await changed
            finally:
                self._waiting.discard(changed)

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def check_integrity(self) -> None:
        """Between steps nothing is under way.

        Raises:
            AssertionError: an export was begun and never ended, or a restore waits.
        """
        busy = [number for number, use in enumerate(self.exports) if not use.idle]
        if busy or self._waiting:
            raise AssertionError(
                f"regions {busy} are being read, {len(self._waiting)} restores wait"
            )
