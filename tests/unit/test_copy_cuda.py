"""Copy engine ``cuda`` on a simulated GPU: order, batches, failures, everything given back."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpu import SimulatedGpu

from dualpath.transfer.copy_cuda import MAX_BATCH, CudaCopyEngine
from dualpath.transfer.copying import Copy, CopyFailed, Run
from dualpath.transfer.cuda_driver import CudaError

pytestmark = pytest.mark.unit

BLOCK = 64
LAYERS = 6
REGIONS = 2
BLOCKS = 5
Bytes = npt.NDArray[np.uint8]


def filled(shape: tuple[int, ...], seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def run_layers(gpu: SimulatedGpu, *, ordered: bool) -> tuple[bool, Bytes, Bytes]:
    """A prefill that holds two layers: load layer k into region k % 2, compute it in place, export
    it, all queued before any of it has run.

    Returns:
        Whether every layer found its own bytes; what was exported; what should have been.
    """
    regions = np.zeros((REGIONS, BLOCKS, BLOCK), np.uint8)
    engine = CudaCopyEngine(gpu, 0, [(regions.ctypes.data, regions.nbytes)])
    compute = gpu.create_stream()
    stored = filled((LAYERS, BLOCKS, BLOCK), 1)
    exported = np.zeros_like(stored)
    good = True
    exports: list[Copy] = []
    for layer in range(LAYERS):
        region = regions[layer % REGIONS]
        source, target = stored[layer].ctypes.data, region.ctypes.data
        # A region is filled again when what it held has been copied out.
        before = exports[-REGIONS:][:1] if ordered and layer >= REGIONS else []
        load = engine.submit(
            [Run(source + i * BLOCK, target + (BLOCKS - 1 - i) * BLOCK, BLOCK) for i in range(5)],
            before,
        )
        if ordered:
            load.before(compute)

        def kernel(layer: int = layer, region: Bytes = region) -> None:
            nonlocal good
            good &= bool((region[::-1] == stored[layer]).all())
            region += 1

        gpu.launch(compute, kernel)
        fence = engine.fence(compute)
        assert fence is not None
        exports.append(
            engine.submit(
                [Run(target, exported[layer].ctypes.data, region.nbytes)],
                [fence] if ordered else (),
            )
        )
    for export in exports:
        export.wait(10.0)
    gpu.advance(1000)
    engine.close()
    gpu.destroy_stream(compute)
    return good, exported, (stored + 1)[:, ::-1]


@given(seed=st.integers(0, 2**32), batches=st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_layer_is_loaded_before_and_exported_after_its_compute(
    seed: int, batches: bool
) -> None:
    gpu = SimulatedGpu(seed=seed, batches=batches)
    good, exported, expected = run_layers(gpu, ordered=True)
    assert good
    assert (exported == expected).all()
    assert gpu.held() == (0, 0, 0, 0)


def test_the_simulation_would_show_a_missing_fence() -> None:
    bad = 0
    for seed in range(20):
        good, exported, expected = run_layers(SimulatedGpu(seed=seed), ordered=False)
        bad += not good or not (exported == expected).all()
    assert bad


def test_one_call_for_all_runs_neighbours_joined() -> None:
    gpu = SimulatedGpu()
    engine = CudaCopyEngine(gpu, 0)
    source, target = filled((4096,), 3), np.zeros(4096, np.uint8)
    pairs = [(i, i) for i in range(16)] + [(20, 40), (21, 41), (30, 25)]
    runs = [
        Run(source.ctypes.data + a * BLOCK, target.ctypes.data + b * BLOCK, BLOCK) for a, b in pairs
    ]
    assert engine.copy(runs) == len(pairs) * BLOCK
    assert gpu.batch_sizes == [3]
    for a, b in pairs:
        assert (target[b * BLOCK :][:BLOCK] == source[a * BLOCK :][:BLOCK]).all()
    assert engine.copy([]) == 0
    assert gpu.batch_sizes == [3]
    engine.close()


def test_batches_are_bounded_and_an_older_driver_gets_a_loop() -> None:
    count = MAX_BATCH + 3
    source, target = filled((count, 2), 4), np.zeros((count, 2), np.uint8)
    runs = [Run(source[i].ctypes.data, target[count - 1 - i].ctypes.data, 2) for i in range(count)]
    for batches, sizes, copies in ((True, [MAX_BATCH, 3], 0), (False, [], count)):
        gpu = SimulatedGpu(batches=batches)
        engine = CudaCopyEngine(gpu, 0)
        target[:] = 0
        assert engine.copy(runs) == 2 * count
        assert (target[::-1] == source).all()
        assert gpu.batch_sizes == sizes
        assert gpu.calls["copy"] == copies
        engine.close()


def test_events_are_used_again() -> None:
    gpu = SimulatedGpu()
    engine = CudaCopyEngine(gpu, 0)
    source, target = filled((BLOCK,), 5), np.zeros(BLOCK, np.uint8)
    run = Run(source.ctypes.data, target.ctypes.data, BLOCK)
    for _ in range(100):
        engine.copy([run])
    assert gpu.calls["record"] == 100
    assert gpu.calls["create_event"] <= 2
    engine.close()
    assert gpu.held() == (0, 0, 0, 0)


def test_fences_come_from_one_thread_and_copies_from_another() -> None:
    """Each has to enter the context; a thread without one fails in the driver."""
    gpu = SimulatedGpu()
    engine = CudaCopyEngine(gpu, 3)
    compute = gpu.create_stream()
    fence = engine.fence(compute)
    assert fence is not None
    source, target = filled((BLOCK,), 6), np.zeros(BLOCK, np.uint8)
    moved: list[int] = []

    def copy() -> None:
        moved.append(engine.copy([Run(source.ctypes.data, target.ctypes.data, BLOCK)], [fence]))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(10.0)
    assert moved == [BLOCK]
    assert (source == target).all()
    engine.close()


class Switch:
    """A fence of another kind."""

    def __init__(self) -> None:
        self.asked = 0

    def reached(self) -> bool:
        self.asked += 1
        return self.asked > 3


def test_a_fence_that_is_not_cudas_must_be_reached() -> None:
    gpu = SimulatedGpu()
    engine = CudaCopyEngine(gpu, 0)
    source, target = filled((BLOCK,), 7), np.zeros(BLOCK, np.uint8)
    switch = Switch()
    run = Run(source.ctypes.data, target.ctypes.data, BLOCK)
    for _ in range(3):
        with pytest.raises(CopyFailed, match="a stream cannot wait for Switch"):
            engine.submit([run], [switch])
    assert gpu.calls["copy_batch"] == 0
    engine.copy([run], [switch])
    assert (source == target).all()
    engine.close()


def test_a_load_does_not_stand_behind_an_export_that_waits_for_the_model() -> None:
    gpu = SimulatedGpu()
    cache, host = np.zeros((2, BLOCK), np.uint8), filled((2, BLOCK), 11)
    engine = CudaCopyEngine(gpu, 0, [(cache.ctypes.data, cache.nbytes)])
    compute = gpu.create_stream()
    running = True
    gpu.launch(compute, lambda: None, lambda: not running)
    fence = engine.fence(compute)
    assert fence is not None
    export = engine.submit([Run(cache[0].ctypes.data, host[0].ctypes.data, BLOCK)], [fence])
    load = engine.submit([Run(host[1].ctypes.data, cache[1].ctypes.data, BLOCK)])
    load.wait(10.0)
    assert (cache[1] == host[1]).all()
    assert not export.reached()
    assert host[0].any()
    running = False
    export.wait(10.0)
    assert not host[0].any()
    engine.close()


def test_a_submission_of_both_directions_is_over_when_both_are() -> None:
    gpu = SimulatedGpu()
    cache, host = filled((2, BLOCK), 12), filled((2, BLOCK), 13)
    expected = cache[0].copy()
    engine = CudaCopyEngine(gpu, 0, [(cache.ctypes.data, cache.nbytes)])
    runs = [
        Run(cache[0].ctypes.data, host[0].ctypes.data, BLOCK),
        Run(host[1].ctypes.data, cache[1].ctypes.data, BLOCK),
    ]
    assert engine.copy(runs) == 2 * BLOCK
    assert (host[0] == expected).all()
    assert (cache[1] == host[1]).all()
    assert gpu.batch_sizes == [1, 1]
    engine.close()


def test_a_device_that_has_stopped_fails_the_copy_in_time() -> None:
    gpu = SimulatedGpu(frozen=True)
    engine = CudaCopyEngine(gpu, 0)
    source, target = filled((BLOCK,), 8), np.zeros(BLOCK, np.uint8)
    copy = engine.submit([Run(source.ctypes.data, target.ctypes.data, BLOCK)])
    with pytest.raises(CopyFailed, match="64 bytes on the GPU: not over after"):
        copy.wait(0.01)
    assert not target.any()


@pytest.mark.parametrize("call", ["copy_batch", "record", "wait_event", "create_event"])
def test_what_the_driver_refuses_fails_the_copy(call: str) -> None:
    gpu = SimulatedGpu()
    engine = CudaCopyEngine(gpu, 0)
    compute = gpu.create_stream()
    fence = engine.fence(compute)
    assert fence is not None
    source, target = filled((BLOCK,), 9), np.zeros(BLOCK, np.uint8)
    gpu.fail = call
    with pytest.raises(CopyFailed, match=rf"{call}: injected"):
        engine.submit([Run(source.ctypes.data, target.ctypes.data, BLOCK)], [fence])
    gpu.fail = "reached"
    with pytest.raises(CopyFailed, match="reached: injected"):
        fence.reached()


@pytest.mark.parametrize("call", ["pin", "create_stream", "use_context"])
def test_a_failing_start_gives_everything_back(call: str) -> None:
    gpu = SimulatedGpu(fail=call)
    with pytest.raises(CudaError, match="injected"):
        CudaCopyEngine(gpu, 0, (), [(4096, 8192)])
    gpu.fail = ""
    assert gpu.held() == (0, 0, 0, 0)


def test_host_memory_is_locked_while_the_engine_lives() -> None:
    gpu = SimulatedGpu()
    engine = CudaCopyEngine(gpu, 0, (), [(4096, 8192), (1 << 20, 4096)])
    assert gpu.pinned == {4096: 8192, 1 << 20: 4096}
    engine.close()
    engine.close()
    assert gpu.held() == (0, 0, 0, 0)
