"""``LibCuda`` against a small library with the driver's C interface, built here. It shows that our
side of the interface is right; no GPU is involved, and benchmarks/copy_engines.py --check is for
machines that have one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dualpath.transfer.copy_cuda import CudaCopyEngine
from dualpath.transfer.copying import CopyFailed, Run
from dualpath.transfer.cuda_driver import CudaError, CudaMissing, LibCuda

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    library = tmp_path / "libcuda_shim.so"
    source = Path(__file__).with_name("cuda_shim.c")
    subprocess.run(
        ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True
    )
    return library


def integer(library: Path, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), name)


def runs(source: np.ndarray, target: np.ndarray, count: int, size: int) -> list[Run]:
    return [
        Run(source.ctypes.data + i * size, target.ctypes.data + (count - 1 - i) * size, size)
        for i in range(count)
    ]


@pytest.mark.parametrize("old", [False, True])
def test_every_call_arrives(shim: Path, old: bool) -> None:
    integer(shim, "shim_old_driver").value = old
    driver = LibCuda(str(shim))
    assert driver.batches is not old
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 50 * 100, dtype=np.uint8)
    target = np.zeros_like(source)
    engine = CudaCopyEngine(driver, 0, (), [(source.ctypes.data, source.nbytes)])
    compute = driver.create_stream()
    raw = ctypes.CDLL(str(shim))
    raw.shim_priority.argtypes = (ctypes.c_void_p,)
    assert raw.shim_priority(compute) == 0  # the least of 0 .. -5
    fence = engine.fence(compute)
    assert fence is not None
    integer(shim, "shim_not_ready").value = 3
    assert not fence.reached()
    copy = engine.submit(runs(source, target, 50, 100), [fence])
    copy.wait(5.0)
    copy.before(compute)
    assert (target.reshape(50, 100)[::-1] == source.reshape(50, 100)).all()
    if not old:
        assert ctypes.c_size_t.in_dll(raw, "shim_batch_count").value == 50
        assert integer(shim, "shim_access_order").value == 1  # in stream order
        assert integer(shim, "shim_flags").value == 1  # overlap with compute
    assert raw.shim_primary_refs() == 1
    engine.close()
    assert raw.shim_primary_refs() == 0


def test_errors_carry_the_drivers_words(shim: Path) -> None:
    driver = LibCuda(str(shim))
    with pytest.raises(CudaError, match=r"cuDeviceGet: invalid device ordinal \(101\)"):
        CudaCopyEngine(driver, 5)
    engine = CudaCopyEngine(driver, 0)
    with pytest.raises(CopyFailed, match=r"cuEventRecord: invalid argument \(1\)"):
        engine.fence(0)
    engine.close()


def test_a_library_that_is_not_the_driver_is_refused() -> None:
    with pytest.raises(CudaMissing, match="libnosuch"):
        LibCuda("libnosuch.so.1")
    with pytest.raises(CudaMissing, match="cuInit"):
        LibCuda("libc.so.6")
