"""Which copy engine is chosen, and what is said when it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from simulated_gpu import SimulatedGpu

from dualpath.transfer import copy_choice
from dualpath.transfer.copy_choice import CopyChoice, CopyEngineMissing, CopyPlace, open_copy_engine
from dualpath.transfer.copy_cnic import RDMA_TRANSPORTS
from dualpath.transfer.copy_host import HostCopyEngine
from dualpath.transfer.copying import Run
from dualpath.transfer.cuda_driver import LibCuda
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import UcxSettings

pytestmark = pytest.mark.unit

TCP = UcxSettings(device="lo", transports="tcp")
RDMA = UcxSettings(device="mlx5_0:1")


@pytest.fixture
def buffer() -> Iterator[Region]:
    with Region(1 << 20) as region:
        yield region


def place(buffer: Region, nic: UcxSettings, device: int | None) -> CopyPlace:
    cache = Region.borrowed(0x7000_0000_0000, 1 << 20, None, device)
    return CopyPlace("pe0/1", nic, device, [cache], [buffer])


@pytest.mark.parametrize("choice", ["auto", "host"])
def test_host_memory_gets_the_host_engine(buffer: Region, choice: CopyChoice) -> None:
    assert open_copy_engine(choice, place(buffer, RDMA, None)).name == "host"


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_gpu_without_rdma_gets_cuda_with_locked_buffers(buffer: Region, choice: CopyChoice) -> None:
    gpu = SimulatedGpu()
    engine = open_copy_engine(choice, place(buffer, TCP, 2), lambda: gpu)
    assert engine.name == "cuda"
    assert gpu.pinned == {buffer.address: buffer.nbytes}
    assert gpu.contexts[2] == 1
    engine.close()
    assert gpu.held() == (0, 0, 0, 0)


def test_gpu_with_rdma_gets_cnic(buffer: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is made with; the agent itself is run in integration/test_copy_loopback.py."""
    made: dict[str, object] = {}

    class Recorded:
        name = "cnic"

        def __init__(self, name: str, settings: UcxSettings, regions: list[Region], **more: object):
            made.update(name=name, settings=settings, regions=regions, **more)

    monkeypatch.setattr(copy_choice, "CnicCopyEngine", Recorded)
    gpu = SimulatedGpu()
    at = place(buffer, RDMA, 1)
    open_copy_engine("auto", at, lambda: gpu)
    assert made["name"] == "pe0/1/copy"
    assert made["settings"] is RDMA
    assert made["regions"] == [*at.cache, *at.host]
    compute = gpu.create_stream()
    fence = made["fence"](compute)  # type: ignore[operator]
    gpu.advance(1)
    assert fence.reached()
    assert not gpu.pinned  # NIXL registers the memory itself
    gpu.destroy_stream(compute)
    made["on_close"]()  # type: ignore[operator]
    assert gpu.held() == (0, 0, 0, 0)
    assert RDMA_TRANSPORTS.split(",")[0] == "rc"


@pytest.mark.parametrize(
    ("choice", "device", "said"),
    [
        ("host", 0, r"engine\.copy: 'host' cannot reach the cache, which is on GPU 0"),
        ("cuda", None, r"engine\.copy: 'cuda' needs a cache on a GPU"),
        ("cuda", 0, r"engine\.copy: 'cuda' cannot work here: the CUDA driver libnosuch"),
        ("auto", 0, r"engine\.copy: 'cuda' cannot work here: the CUDA driver libnosuch"),
        ("cnic", 0, r"engine\.copy: 'cnic' cannot work here: the CUDA driver libnosuch"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    buffer: Region, choice: CopyChoice, device: int | None, said: str
) -> None:
    with pytest.raises(CopyEngineMissing, match=said) as caught:
        open_copy_engine(choice, place(buffer, TCP, device), partial(LibCuda, "libnosuch.so"))
    assert "\n" not in str(caught.value)


def test_a_gpu_that_refuses_is_given_back(buffer: Region) -> None:
    gpu = SimulatedGpu(fail="pin")
    with pytest.raises(CopyEngineMissing, match="pin: injected"):
        open_copy_engine("cuda", place(buffer, TCP, 0), lambda: gpu)
    gpu.fail = ""
    assert gpu.held() == (0, 0, 0, 0)


def test_host_engine_moves_small_and_large_runs() -> None:
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    sizes = [1, 4096, 100_000, 200_000, 1 << 20]
    runs, at = [], 0
    for size in sizes:
        runs.append(Run(source.ctypes.data + at, target.ctypes.data + at + 7, size))
        at += size + 64
    engine = HostCopyEngine()
    assert engine.copy(runs) == sum(sizes)
    at = 0
    for size in sizes:
        assert (target[at + 7 : at + 7 + size] == source[at : at + size]).all()
        at += size + 64
    assert target.any()
    assert not target[sizes[0] + 7 : sizes[0] + 64].any()
    assert engine.fence(0) is None
    engine.close()
