"""Loading hit blocks into the device cache, layer by layer, while the model computes.

The traffic thread fills layers in order; vLLM's thread waits for one layer at a time. The two
share only ``LayerLoad``: a watermark of finished layers behind a condition.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.transfer.copying import Fence


class LoadFailed(RuntimeError):
    """A layer did not arrive: its tokens must be computed again."""


class LoadState(enum.Enum):
    """Where a load stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """One stored block to load: its index in the prompt and the engine blocks it goes to."""

    index: int
    engine_blocks: tuple[int, ...]


class LayerLoad:
    """One request's load in one step.

    ``again``: the request's KV was in the cache before, and its layers have given way to others
    since: these bytes move a second time. ``after``: what the device must have reached before
    anything is written, because its earlier work may still use these blocks.

    Thread safety: ``advance``, ``fail`` and ``finish`` belong to the traffic thread, ``wait`` and
    ``cancel`` to vLLM's. After ``cancel`` or ``fail`` has returned no byte is written into the
    cache any more, because every copy runs between ``enter_copy`` and ``leave_copy``.
    """

    def __init__(
        self,
        request_id: str,
        blocks: tuple[LoadBlock, ...],
        num_layers: int,
        *,
        again: bool = False,
        after: Sequence[Fence] = (),
    ) -> None:
        self.request_id = request_id
        self.after = after
        self.again = again
        self.blocks = blocks
        self.num_layers = num_layers
        self.bytes_loaded = 0
        self._ready_layers = 0
        self._state = LoadState.RUNNING
        self._reason = ""
        self._copying = 0
        self._changed = threading.Condition()

    @property
    def state(self) -> LoadState:
        """Current state."""
        with self._changed:
            return self._state

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self._reason

    def enter_copy(self) -> bool:
        """Claim the cache for a copy; False when the load is over and must not touch it."""
        with self._changed:
            if self._state is not LoadState.RUNNING:
                return False
            self._copying += 1
            return True

    def leave_copy(self, nbytes: int) -> None:
        """End the copy begun by ``enter_copy``."""
        with self._changed:
            self._copying -= 1
            self.bytes_loaded += nbytes
            self._changed.notify_all()

    def advance(self, layers: int) -> None:
        """The first ``layers`` layers are in the cache."""
        with self._changed:
            self._ready_layers = max(self._ready_layers, layers)
            if self._ready_layers == self.num_layers and self._state is LoadState.RUNNING:
                self._state = LoadState.DONE
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Give the load up (traffic thread)."""
        with self._changed:
            if self._state is LoadState.RUNNING:
                self._state = LoadState.FAILED
                self._reason = reason
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until ``layer`` is loaded.

        Raises:
            LoadFailed: it will not arrive, or not within ``timeout_s``; nothing is written into
                the cache after this.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._ready_layers <= layer and self._state is LoadState.RUNNING:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._state = LoadState.FAILED
                    self._reason = f"layer {layer} did not arrive within {timeout_s:g} s"
                    break
                self._changed.wait(left)
            if self._ready_layers > layer:
                return
            while self._copying:  # a memmove in progress: it ends by itself
                self._changed.wait(1.0)
            raise LoadFailed(self._reason)

    def cancel(self, reason: str) -> None:
        """Stop the load and wait until no copy is in progress (vLLM's thread)."""
        with self._changed:
            if self._state is LoadState.RUNNING:
                self._state = LoadState.FAILED
                self._reason = reason
            while self._copying:
                self._changed.wait(1.0)


class DeviceUse:
    """Counts operations that read or write one vLLM request's blocks in the device cache.

    vLLM frees the blocks only when the count is zero. ``enter`` is called by vLLM's thread when
    it hands work over, ``leave`` by the traffic thread when the last byte has been touched.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def enter(self, count: int = 1) -> None:
        """``count`` more operations use the blocks."""
        with self._changed:
            self._count += count

    def leave(self, count: int = 1) -> None:
        """``count`` operations are over.

        Raises:
            RuntimeError: more left than entered.
        """
        with self._changed:
            if count > self._count:
                raise RuntimeError("more device operations ended than were begun")
            self._count -= count
            if not self._count:
                self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Nothing uses the blocks."""
        with self._changed:
            return self._count == 0

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until idle; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)
