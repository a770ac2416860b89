"""The vLLM connector of prefill and decode engines.

Loaded out of tree: ``kv_connector = "DualPathConnector"``, ``kv_connector_module_path =
"dualpath.engine.connector"``. Its ``kv_connector_extra_config`` names the cluster file and this
engine's place in it::

    {"config_file": "...", "role": "prefill", "rank": 0, "http_url": "http://127.0.0.1:8101",
     "control": "127.0.0.1:8001", "run_dir": "..."}
"""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.engine import FinishReason

from dualpath import config as cluster
from dualpath import logs
from dualpath.blocks import BlockLayout
from dualpath.config import ClusterConfig, Role, engine_name
from dualpath.control.host import host_id
from dualpath.engine import assemble
from dualpath.engine.aliasing import regions_of
from dualpath.engine.identity import describe_cache, model_digest
from dualpath.engine.layer_turns import LayerTurns, stream_of
from dualpath.engine.live import LiveFigures
from dualpath.engine.metadata import StepMetadata, WorkerMetadata
from dualpath.engine.place import place_of
from dualpath.engine.recorder import AttentionRecorder, recorder_for
from dualpath.engine.scheduler_side import SchedulerSide
from dualpath.engine.worker_side import WorkerSide
from dualpath.spans import Spans, spans_for
from dualpath.transfer.copying import Fence
from dualpath.transfer.manager import EngineFailing, TrafficManager

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class DualPathConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """KV of this engine's requests over both read paths. See ``KVConnectorBase_V1`` for each
    method's caller and frequency; the work is in ``SchedulerSide`` and ``WorkerSide``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._place = place_of(vllm_config)
        self._cluster = cluster.load(self._place.config_file)
        logs.set_up_engine(self._cluster.log, engine_name(self._place.role, self._place.rank))
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._manager: TrafficManager | None = None
        self._spans: Spans | None = None
        self._recorder: AttentionRecorder | None = None
        self._layer_numbers: dict[str, int] = {}
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = SchedulerSide(
                self._place.role,
                layout := _scheduler_layout(self._cluster, kv_cache_config),
                aliased=self._cluster.layer_regions(self._place.role, layout.num_layers)
                < layout.num_layers,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A PE's request that is preempted with its answer in flight must run again: its KV has
        not reached the DE. A DE hands nothing on."""
        return self._place.role is Role.PREFILL

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks are Python: they must run between graph pieces."""
        return True

    # ---- worker side -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the cache, start the traffic manager, join the cluster.

        Raises:
            UnsupportedEngine, HandshakeRefused: this engine cannot be part of this cluster.
        """
        config = self._vllm_config
        cache, layout_id = describe_cache(
            kv_caches, config, self._kv_cache_config, self._cluster.engine.block_tokens
        )
        model = config.model_config
        identity = assemble.EngineIdentity(
            role=self._place.role,
            rank=self._place.rank,
            incarnation=uuid.uuid4().hex,
            pid=os.getpid(),
            host_id=host_id(),
            http_url=self._place.http_url,
            model=model_digest(model.model, model.hf_config.to_dict()),
            layout_id=layout_id,
            dtype=str(next(iter(kv_caches.values())).dtype).removeprefix("torch."),
            max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        )
        regions = regions_of(self._cluster, self._place.role, cache)
        self._layer_numbers = assemble.layer_numbers(kv_caches)
        if self._place.role is Role.PREFILL:
            self._recorder = recorder_for(next(iter(kv_caches.values())).device.type)
        name = engine_name(self._place.role, self._place.rank)
        self._spans = spans_for(self._cluster.log.timeline, name)
        live = LiveFigures(cache.layout.engine_block_tokens, cache.num_blocks)
        self._manager = assemble.traffic_manager(
            self._cluster,
            identity,
            cache,
            keepalive=kv_caches,
            control=self._place.control,
            run_dir=Path(self._place.run_dir),
            live_stats=live.snapshot,
            attention=self._recorder,
            regions=regions,
            spans=self._spans,
        )
        self._manager.start()
        stream = stream_of(next(iter(kv_caches.values())).device)
        manager = self._manager

        def fence() -> Fence | None:
            return manager.fence(stream())

        turns = None if regions is None else LayerTurns(manager, regions, fence)
        self._worker_side = WorkerSide(
            manager,
            cache.layout.num_layers,
            self._cluster.timeouts,
            live,
            turns,
            self._spans,
            fence,
        )

    @property
    def _worker(self) -> WorkerSide:
        if self._worker_side is None:
            raise RuntimeError("register_kv_caches has not been called")
        if self._manager is not None and self._manager.failing is not None:
            raise EngineFailing(self._manager.failing)
        return self._worker_side

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Let go of preempted requests' blocks."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: start loads, wait for layer 0."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.begin(connector_metadata)
        if self._recorder is not None:
            self._recorder.step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: vLLM may call this after the forward pass, so loads start earlier."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer's attention begins; its KV was awaited before (see ``worker_side``)."""
        if self._recorder is not None:
            self._recorder.layer_begins()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer is computed."""
        if self._recorder is not None:  # before anything that waits
            self._recorder.layer_ended()
        self._worker.after_layer(self._layer_numbers[layer_name])

    def wait_for_save(self) -> None:
        """The step is computed."""
        if self._recorder is not None:
            self._recorder.step_ended()
        self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed."""
        if self._recorder is not None:
            self._recorder.collect()
        return self._worker.take_freed() or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute again."""
        return self._worker.take_failed_blocks()

    def failed_requests(self) -> frozenset[str]:
        """Requests of the latest step whose sampled tokens vLLM drops, because a load failed."""
        return self._worker.failed_requests

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """News of preempted requests for the scheduler half."""
        restored = self._worker.take_restored()
        return WorkerMetadata(restored) if restored else None

    def weights_changed(self, how: str) -> None:
        """The weights were replaced in place: make older KV unreachable before going on.

        Raises:
            TimeoutError: no front acknowledged it.
        """
        if self._manager is not None:
            epoch = self._manager.weights_changed(how, self._cluster.timeouts.connect)
            logger.info("%s: weight epoch is now %d", how, epoch)

    def shutdown(self) -> None:
        """Stop the traffic manager."""
        if self._manager is not None:
            self._manager.stop(self._cluster.timeouts.drain + 2.0)
            self._manager = None
        if self._spans is not None:
            self._spans.close()

    # ---- scheduler side ----------------------------------------------------------------------

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None
        return self._scheduler_side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens the engine's host memory holds; always synchronous. None while the blocks of a
        preempted request are being read back."""
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks are allocated."""
        self._scheduler.after_alloc(request, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The worker's news."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMetadata):
            self._scheduler.restored(meta.restored)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker must do in this step."""
        return self._scheduler.build(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; keep its blocks until the worker has let go of them."""
        aborted = request.get_finished_reason() not in _GOOD_ENDS
        return self._scheduler.finished(request, aborted), None

    def has_pending_push_work(self) -> bool:
        """Keep stepping until the worker has been told of every finished request."""
        return self._scheduler.has_news


_GOOD_ENDS = frozenset((FinishReason.STOP, FinishReason.LENGTH))


def _scheduler_layout(config: ClusterConfig, kv_cache_config: KVCacheConfig) -> BlockLayout:
    """Block sizes for the scheduler half, which needs tokens only."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return BlockLayout(
        num_layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
        block_tokens=config.engine.block_tokens,
        engine_block_tokens=spec.block_size,
        token_layer_bytes=max(1, spec.page_size_bytes // spec.block_size),
    )
