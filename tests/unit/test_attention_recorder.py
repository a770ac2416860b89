"""Attention time of steps, counted when the device has finished them, in order."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytest.importorskip("vllm")

from dualpath.engine.metadata import StepMetadata
from dualpath.engine.recorder import MAX_SAMPLES, AttentionRecorder, HostTimes, recorder_for

pytestmark = pytest.mark.unit


class Device:
    """A device on which layer n takes n seconds; it finishes steps when told to."""

    made: ClassVar[list[Device]] = []

    def __init__(self) -> None:
        self.layers = 0
        self.begun = False
        self.over = False
        Device.made.append(self)

    def start(self) -> None:
        self.begun = True

    def stop(self) -> None:
        assert self.begun
        self.begun = False
        self.layers += 1

    def seconds(self) -> float | None:
        return float(sum(range(1, self.layers + 1))) if self.over else None


def step(recorder: AttentionRecorder, single: tuple[int, int] | None, layers: int) -> Device:
    recorder.step(StepMetadata(single=single))
    device = Device.made[-1]
    for _ in range(layers):
        recorder.layer_begins()
        recorder.layer_ended()
    recorder.step_ended()
    return device


def test_steps_are_counted_when_the_device_has_finished_them() -> None:
    recorder = AttentionRecorder(Device)  # type: ignore[arg-type]
    first = step(recorder, (64, 32), 3)
    second = step(recorder, None, 2)
    third = step(recorder, (0, 5), 1)
    assert recorder.take() == []
    assert recorder.total_s == 0.0
    third.over = True  # not before its predecessors
    recorder.collect()
    assert recorder.take() == []
    first.over = True
    recorder.collect()
    assert recorder.take() == [(64, 32, 6.0)]
    assert recorder.take() == []
    second.over = True
    recorder.collect()
    assert recorder.take() == [(0, 5, 1.0)]  # the second had several requests
    assert recorder.total_s == 6.0 + 3.0 + 1.0


def test_samples_nobody_takes_do_not_pile_up() -> None:
    recorder = AttentionRecorder(Device)  # type: ignore[arg-type]
    for number in range(MAX_SAMPLES + 10):
        step(recorder, (number, 1), 1).over = True
    recorder.collect()
    taken = recorder.take()
    assert len(taken) == MAX_SAMPLES
    assert taken[-1][0] == MAX_SAMPLES + 9
    assert recorder.total_s == MAX_SAMPLES + 10


def test_the_host_clock_adds_up_layers_only() -> None:
    recorder = recorder_for("cpu")
    recorder.step(StepMetadata(single=(1, 2)))
    recorder.step_ended()
    assert recorder.take() == []  # no layer ran: nothing was measured
    recorder.step(StepMetadata(single=(1, 2)))
    recorder.layer_begins()
    recorder.layer_ended()
    recorder.step_ended()
    ((cached, bsz, seconds),) = recorder.take()
    assert (cached, bsz) == (1, 2)
    assert seconds == recorder.total_s > 0
    assert HostTimes().seconds() == 0.0
