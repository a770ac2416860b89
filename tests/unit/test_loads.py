"""The meeting point of vLLM's thread and the traffic thread."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.transfer.hbm import Run, merge_runs
from dualpath.transfer.loads import DeviceUse, LayerLoad, LoadFailed, LoadState

pytestmark = pytest.mark.unit


def test_a_waiter_gets_each_layer_as_it_arrives() -> None:
    load = LayerLoad("r", (), 3)
    seen: list[int] = []

    def model() -> None:
        for layer in range(3):
            load.wait(layer, 10.0)
            seen.append(layer)

    thread = threading.Thread(target=model)
    thread.start()
    for layers in (1, 2, 3):
        load.advance(layers)
    thread.join(10.0)
    assert seen == [0, 1, 2]
    assert load.state is LoadState.DONE


def test_late_layer_fails_and_no_copy_may_begin_after_that() -> None:
    load = LayerLoad("r", (), 2)
    load.advance(1)
    load.wait(0, 0.01)
    with pytest.raises(LoadFailed, match="layer 1"):
        load.wait(1, 0.01)
    assert not load.enter_copy()
    load.advance(2)
    assert load.state is LoadState.FAILED


def test_a_failed_load_stays_failed() -> None:
    load = LayerLoad("r", (), 2)
    load.fail("gone")
    for layer in range(2):
        with pytest.raises(LoadFailed, match="gone"):
            load.wait(layer, 1.0)


def test_cancel_waits_for_the_copy_in_progress() -> None:
    load = LayerLoad("r", (), 1)
    assert load.enter_copy()
    cancelled = threading.Event()
    thread = threading.Thread(target=lambda: (load.cancel("stop"), cancelled.set()))
    thread.start()
    assert not cancelled.wait(0.05)
    load.leave_copy(10)
    assert cancelled.wait(10.0)
    thread.join(10.0)
    assert not load.enter_copy()


def test_device_use_counts() -> None:
    use = DeviceUse()
    assert use.idle
    use.enter(2)
    use.leave()
    assert not use.wait_idle(0.01)
    use.leave()
    assert use.wait_idle(0.01)
    with pytest.raises(RuntimeError):
        use.leave()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5))))
def test_merging_moves_the_same_bytes(parts: list[tuple[int, int, int]]) -> None:
    def moved(runs: list[Run]) -> list[tuple[int, int]]:
        return [
            (run.source + byte, run.target + byte) for run in runs for byte in range(run.nbytes)
        ]

    runs = [Run(*part) for part in parts]
    merged = merge_runs(runs)
    assert moved(merged) == moved(runs)
    assert len(merged) <= len(runs)
