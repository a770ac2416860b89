"""vLLM's worker with two additions: whoever replaces its weights advances the weight epoch, and on
CPU a seeded request may take several steps for its prompt."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from dualpath.engine.connector import DualPathConnector
from dualpath.engine.rewind import begin_step

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class DualPathWorker(BaseWorker):  # type: ignore[misc]
    """``--worker-cls dualpath.engine.worker.DualPathWorker``.

    Every in-place change of weights is followed by ``weights_changed``, which returns only when
    the front has made all older KV unreachable. It is called also when the change itself failed
    half-way: weights of which nobody knows what they are must not hit anything either.
    """

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, after seeing to it that a seeded draw can be taken back."""
        if current_platform.is_cpu():
            begin_step(self.model_runner)
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


def _announce(how: str) -> None:
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    if isinstance(connector, DualPathConnector):
        connector.weights_changed(how)
