"""The half of the connector inside vLLM's worker: it hands work to the traffic thread and waits,
layer by layer, for what the model needs next.

Two facts of vLLM shape this file. Layer ``k`` writes the KV of new tokens *before* its hooked
attention runs, so anything loaded into a block that also takes new tokens must be there before
layer ``k`` begins: layer ``k + 1`` is awaited at the end of ``save_kv_layer(k)``, layer 0 when the
step begins. And ``start_load_kv`` may run after the forward pass, so loads start in
``bind_connector_metadata``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dualpath.config import TimeoutConfig
from dualpath.engine.layer_turns import LayerTurns
from dualpath.engine.live import LiveFigures
from dualpath.engine.metadata import FinishedRequest, StepMetadata, StepRequest
from dualpath.engine.waits import LayerWaits
from dualpath.spans import Spans
from dualpath.transfer.copying import Fence
from dualpath.transfer.decode import DecodeSession
from dualpath.transfer.exports import PushBlock
from dualpath.transfer.loads import DeviceUse, LayerLoad, LoadFailed
from dualpath.transfer.manager import Session, TrafficManager
from dualpath.transfer.prefill import PrefillSession

logger = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.002
"""A step without tokens exists only to collect finished transfers: pause instead of spinning."""


class _Active:
    """A request of the current step that moves KV."""

    __slots__ = ("failed", "load", "session", "step", "use")

    def __init__(self, step: StepRequest, session: Session, use: DeviceUse) -> None:
        self.step = step
        self.session = session
        self.use = use
        self.load: LayerLoad | None = None
        self.failed = False


class WorkerSide:
    """See ``KVConnectorBase_V1``'s worker-side methods, which delegate here. vLLM's thread only."""

    def __init__(
        self,
        manager: TrafficManager,
        num_layers: int,
        timeouts: TimeoutConfig,
        live: LiveFigures,
        turns: LayerTurns | None = None,
        spans: Spans | None = None,
        fence: Callable[[], Fence | None] = lambda: None,
    ) -> None:
        self._manager = manager
        self._live = live
        self._num_layers = num_layers
        self._timeouts = timeouts
        self._turns = turns
        self._fence = fence
        self.waits = LayerWaits(num_layers, spans)
        self._uses: dict[str, DeviceUse] = {}
        self._freeing: dict[str, DeviceUse] = {}
        self._names: dict[str, tuple[str, int]] = {}
        self._active: list[_Active] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._restoring: set[str] = set()
        self._restored: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._step_tokens = 0
        self._pause = threading.Event()

    # ---- a step begins -----------------------------------------------------------------------

    def preempted(self, meta: StepMetadata) -> None:
        """vLLM is about to hand these requests' blocks to others: let go of them first."""
        for request_id in meta.preempted:
            use = self._uses.get(request_id)
            name = self._names.get(request_id)
            if use is None or name is None:
                continue
            session = self._manager.session(*name)
            if isinstance(session, DecodeSession):
                self._manager.call(partial(session.forget_device, request_id))
            if not use.wait_idle(self._timeouts.transfer):
                logger.warning("%s: transfers outlive the preemption; giving up on them", name[0])
                if isinstance(session, PrefillSession):
                    self._manager.call(partial(session.abandon, "preempted during a transfer"))

        for request_id, tokens in meta.restore.items():
            self._restore(request_id, tokens)

    def _restore(self, request_id: str, tokens: int) -> None:
        """Have a preempted request's stored blocks read back; ``take_restored`` has the outcome."""
        self._restoring.add(request_id)
        session = self._manager.session(*self._names.get(request_id, ("", 0)))
        if not isinstance(session, DecodeSession):  # closed: vLLM's abort is on its way
            self._restored.put((request_id, 0))
            return

        def told(request_id: str, blocks: int) -> None:
            self._restored.put((request_id, blocks))

        self._manager.call(partial(session.restore, request_id, tokens, told))

    def begin(self, meta: StepMetadata) -> None:
        """Start this step's loads and wait for layer 0."""
        self._step_tokens = meta.scheduled_tokens
        self._active = []
        self._failed_requests = set()
        if self._turns is not None:
            self._turns.begin_step()
        self._live.running = len(meta.requests)
        for request_id in meta.preempted:
            self._live.held.pop(request_id, None)
        for step in meta.requests:
            self._live.held[step.request_id] = step.held_blocks
            if step.resumed is not None:
                restored, recomputed = step.resumed
                self._manager.count(
                    preemptions=1,
                    preempted_restored_tokens=restored,
                    preempted_recomputed_tokens=recomputed,
                )
            session = self._manager.session(step.rid, step.attempt)
            use = self._uses.setdefault(step.request_id, DeviceUse())
            self._names[step.request_id] = (step.rid, step.attempt)
            if session is None:
                self._lost(step)
                continue
            active = _Active(step, session, use)
            self._active.append(active)
            if isinstance(session, PrefillSession) and step.hit_blocks is not None:
                self._settle(active, session)
                self._manager.call(partial(session.begin, step.hit_blocks))
            if step.load:
                active.load = load = LayerLoad(
                    step.request_id,
                    step.load,
                    self._num_layers,
                    again=step.load_again,
                    after=self._launched(),
                )
                use.enter()
                self._manager.call(partial(session.load, load, use))
        for finished in meta.finished:
            self._finish(finished)
        self._await_all(0)
        for active in self._active:
            if not active.session.spec.layerwise:
                self._await_layer(active, self._num_layers - 1)

    def _settle(self, active: _Active, session: PrefillSession) -> None:
        """Before a prompt begins again: its blocks of the first time are still being pushed, out
        of memory that the second time writes into."""
        if not active.use.wait_idle(self._timeouts.transfer):
            self._manager.call(partial(session.abandon, "its pushes outlive a new beginning"))

    def _lost(self, step: StepRequest) -> None:
        """The session is closed: vLLM's abort is on its way. What would have been loaded is
        marked as missing, so that no token is ever computed from an empty block."""
        self._failed(step)

    def _failed(self, step: StepRequest) -> None:
        if step.load:
            self._failed_requests.add(step.request_id)
        for block in step.load:
            self._failed_blocks.update(block.engine_blocks)

    def _finish(self, finished: FinishedRequest) -> None:
        use = self._uses.pop(finished.request_id, None) or DeviceUse()
        self._names.pop(finished.request_id, None)
        self._restoring.discard(finished.request_id)
        session = self._manager.session(finished.rid, finished.attempt)
        if isinstance(session, DecodeSession):
            if finished.persist:
                blocks = finished.persist
                use.enter(len(blocks))
                work = partial(session.persist, finished.request_id, blocks, use, self._launched())
                self._manager.call(work)
            self._manager.call(session.vllm_finished)
        elif isinstance(session, PrefillSession):
            self._manager.call(partial(session.vllm_finished, finished.ok))
        if finished.holds_blocks:
            self._freeing[finished.request_id] = use
        else:
            self._live.held.pop(finished.request_id, None)

    # ---- layer by layer ----------------------------------------------------------------------

    def _await_all(self, layer: int) -> None:
        """Wait until the model may begin ``layer``."""
        started_s = time.monotonic()
        if self._turns is not None:
            self._turns.await_region(layer, self._timeouts.layer)
        for active in self._active:
            self._await_layer(active, layer)
        self.waits.waited(layer, started_s)

    def _await_layer(self, active: _Active, layer: int) -> None:
        if active.load is None or active.failed:
            return
        try:
            active.load.wait(layer, self._timeouts.layer)
        except LoadFailed as error:
            logger.warning("%s: computing hit tokens again: %s", active.step.rid, error)
            active.failed = True
            active.load.cancel("given up")
            self._failed(active.step)

    def after_layer(self, layer: int) -> None:
        """Layer ``layer`` of this step is computed: push it, and wait for the next one's KV."""
        self.waits.computed(layer)
        for active in self._active:
            if active.session.spec.layerwise:
                self._push(active, layer)
        if self._turns is not None:
            self._turns.computed(layer)
        if layer + 1 < self._num_layers:
            self._await_all(layer + 1)

    def _push(self, active: _Active, layer: int) -> None:
        blocks: Sequence[PushBlock] = active.step.push
        session = active.session
        if not blocks or active.failed or not isinstance(session, PrefillSession):
            return
        active.use.enter()
        if self._turns is not None:
            self._turns.export_begins(layer)
        work = partial(session.push_layer, layer, blocks, active.use, self._launched())
        self._manager.call(work)

    def _launched(self) -> tuple[Fence, ...]:
        """Marks the end of what the model has launched on the device so far; nothing on CPU."""
        fence = self._fence()
        return () if fence is None else (fence,)

    def end(self) -> None:
        """The step is computed: what was not pushed layer by layer goes now, and finished
        blocks are made durable."""
        if self._active:
            self._manager.count(layer_wait_us=self.waits.take_us())
        for active in self._active:
            session = active.session
            if not session.spec.layerwise:
                for layer in range(self._num_layers):
                    self._push(active, layer)
            if isinstance(session, DecodeSession) and active.step.persist and not active.failed:
                blocks = active.step.persist
                active.use.enter(len(blocks))
                work = partial(
                    session.persist,
                    active.step.request_id,
                    blocks,
                    active.use,
                    self._launched(),
                )
                self._manager.call(work)
        self._active = []

    # ---- results ----------------------------------------------------------------------------

    def take_freed(self) -> set[str]:
        """Requests whose blocks nothing uses any more."""
        freed = {request_id for request_id, use in self._freeing.items() if use.idle}
        if not freed and (self._freeing or self._restoring) and not self._step_tokens:
            self._pause.wait(_IDLE_WAIT_S)
            freed = {request_id for request_id, use in self._freeing.items() if use.idle}
        for request_id in freed:
            del self._freeing[request_id]
            self._live.held.pop(request_id, None)
        return freed

    def take_restored(self) -> dict[str, int]:
        """Preempted requests whose stored blocks are in host memory again, and how many blocks
        that is (0 when none is)."""
        restored: dict[str, int] = {}
        while True:
            try:
                request_id, blocks = self._restored.get_nowait()
            except queue.Empty:
                return restored
            if request_id in self._restoring:
                self._restoring.remove(request_id)
                restored[request_id] = blocks

    @property
    def failed_requests(self) -> frozenset[str]:
        """Requests of the latest step whose load failed: vLLM drops the tokens it samples."""
        return frozenset(self._failed_requests)

    def take_failed_blocks(self) -> set[int]:
        """Engine blocks whose load failed in this step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed
