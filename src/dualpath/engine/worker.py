"""vLLM's worker with three additions: a PE's layers take turns in its memory, whoever replaces the
weights advances the weight epoch, and on CPU a seeded request may take several steps for its
prompt."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from dualpath import config as cluster
from dualpath.engine.aliasing import aliased, planned_bytes, refuse_layers
from dualpath.engine.connector import DualPathConnector
from dualpath.engine.place import place_of
from dualpath.engine.rewind import begin_step, dropped_draws

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


logger = logging.getLogger(__name__)


class DualPathWorker(BaseWorker):  # type: ignore[misc]
    """``--worker-cls dualpath.engine.worker.DualPathWorker``.

    Every in-place change of weights is followed by ``weights_changed``, which returns only when
    the front has made all older KV unreachable. It is called also when the change itself failed
    half-way: weights of which nobody knows what they are must not hit anything either.
    """

    _available_bytes = 0

    def determine_available_memory(self) -> int:
        """vLLM's figure; on a PE raised to what the blocks would take if every layer were there.

        Raises:
            UnsupportedEngine: the model's layers cannot take turns.
        """
        self._available_bytes = int(super().determine_available_memory())
        layers, regions = self._shape()
        if regions < layers:
            refuse_layers(self.get_kv_cache_spec())
        return planned_bytes(self._available_bytes, layers, regions)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """vLLM's, with the layers of a PE placed in a few regions.

        Raises:
            UnsupportedEngine: the cache cannot be laid out so, or does not fit.
        """
        layers, regions = self._shape()
        size = 0
        if regions < layers:
            kv_cache_config, size = aliased(kv_cache_config, regions, self._available_bytes)
        super().initialize_from_config(kv_cache_config)
        if size:  # only now is there a log to write to
            logger.info(
                "%d layers take turns in %d regions: %d blocks in %d bytes, %.2f times as many as "
                "with all layers in memory",
                layers,
                regions,
                kv_cache_config.num_blocks,
                size,
                layers / regions,
            )

    def _shape(self) -> tuple[int, int]:
        """Layers with KV, and regions for them."""
        layers = len(self.get_kv_cache_spec())
        place = place_of(self.vllm_config)
        return layers, cluster.load(place.config_file).layer_regions(place.role, layers)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, after seeing to it that a seeded draw can be taken back."""
        if current_platform.is_cpu():
            begin_step(self.model_runner)
        connector = _connector()
        failed = frozenset() if connector is None else connector.failed_requests()
        with dropped_draws(self.model_runner, failed):
            return super().sample_tokens(*args, **kwargs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's reload from disk or from given tensors."""
        try:
            super().reload_weights(*args, **kwargs)
        finally:
            _announce("reload_weights")

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """One chunk from a trainer: weights are mixed from here on."""
        try:
            super().update_weights(*args, **kwargs)
        finally:
            _announce("update_weights")

    def finish_weight_update(self) -> None:
        """The last chunk is in."""
        try:
            super().finish_weight_update()
        finally:
            _announce("finish_weight_update")

    def reset_weights(self, *args: Any, **kwargs: Any) -> None:
        """Weights back to what they were at start, or to nothing."""
        try:
            super().reset_weights(*args, **kwargs)
        finally:
            _announce("reset_weights")

    def sleep(self, level: int = 1) -> None:
        """Weights (level 2) and KV are dropped."""
        try:
            super().sleep(level)
        finally:
            _announce("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """What comes back after a sleep may be other weights."""
        try:
            super().wake_up(tags)
        finally:
            _announce("wake_up")


def _connector() -> DualPathConnector | None:
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector if isinstance(connector, DualPathConnector) else None


def _announce(how: str) -> None:
    connector = _connector()
    if connector is not None:
        connector.weights_changed(how)
