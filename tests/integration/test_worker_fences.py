"""What vLLM's thread hands over is marked with where the device has to have got to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from dualpath.config import TimeoutConfig
from dualpath.engine.live import LiveFigures
from dualpath.engine.metadata import FinishedRequest, StepMetadata, StepRequest
from dualpath.engine.worker_side import WorkerSide
from dualpath.transfer.decode import DecodeSession, PersistBlock
from dualpath.transfer.exports import PushBlock
from dualpath.transfer.loads import LayerLoad, LoadBlock
from dualpath.transfer.prefill import PrefillSession

pytestmark = pytest.mark.integration

LAYERS = 3


class Mark:
    """A fence; its number is how much had been launched."""

    def __init__(self, launched: int) -> None:
        self.launched = launched

    def reached(self) -> bool:
        return True


class Manager:
    """Keeps what it is asked to do; loads are there at once."""

    def __init__(self, session: object) -> None:
        self._session = session
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def session(self, rid: str, attempt: int) -> object:
        return self._session

    def call(self, work: Callable[[], None]) -> None:
        if isinstance(work, partial):
            self.asked.append((work.func.__name__, work.args))
            for argument in work.args:
                if isinstance(argument, LayerLoad):
                    argument.advance(LAYERS)

    def count(self, **amounts: int) -> None:
        pass

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [args for asked, args in self.asked if asked == name]


class Device:
    """Launches a layer at a time."""

    def __init__(self, kind: type, **spec: Any) -> None:
        session = object.__new__(kind)
        session.spec = SimpleNamespace(layerwise=True, **spec)
        self.launched = 0
        self.manager = Manager(session)
        self.worker = WorkerSide(
            self.manager,  # type: ignore[arg-type]
            LAYERS,
            TimeoutConfig(),
            LiveFigures(64, 16),
            fence=lambda: Mark(self.launched),
        )

    def step(self, *requests: StepRequest, finished: tuple[FinishedRequest, ...] = ()) -> None:
        self.worker.begin(
            StepMetadata(scheduled_tokens=1, requests=list(requests), finished=list(finished))
        )
        for layer in range(LAYERS):
            self.launched += 1
            self.worker.after_layer(layer)
        self.worker.end()


def test_a_layer_is_pushed_after_its_own_launch_and_loaded_after_what_came_before() -> None:
    pe = Device(PrefillSession)
    pe.launched = 40
    load, push = (LoadBlock(0, (1,)),), (PushBlock(1, (2,)),)
    pe.step(StepRequest("r", "r", 0, load=load, hit_blocks=1, push=push))
    (((loaded, _)),) = pe.manager.named("load")
    assert [mark.launched for mark in loaded.after] == [40]
    pushes = pe.manager.named("push_layer")
    assert [(layer, mark.launched) for layer, _, _, (mark,) in pushes] == [
        (0, 41),
        (1, 42),
        (2, 43),
    ]


def test_blocks_are_persisted_after_the_step_that_completes_them() -> None:
    de = Device(DecodeSession)
    block = PersistBlock(0, (3,), (1, 2))
    de.step(StepRequest("r", "r", 0, persist=(block,)))
    de.step(finished=(FinishedRequest("r", "r", 0, True, True, (block,)),))
    marks = [after[0].launched for _, _, _, after in de.manager.named("persist")]
    assert marks == [LAYERS, LAYERS]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    pe = Device(PrefillSession)
    pe.worker._fence = lambda: None
    pe.step(StepRequest("r", "r", 0, push=(PushBlock(0, (2,)),)))
    assert [after for _, _, _, after in pe.manager.named("push_layer")] == [()] * LAYERS
