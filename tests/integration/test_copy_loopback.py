"""Copy engine ``cnic`` for real: a NIXL agent that writes to itself, over TCP, host to host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from dualpath.transfer.copy_choice import CopyEngineMissing, CopyPlace, open_copy_engine
from dualpath.transfer.copy_cnic import CnicCopyEngine
from dualpath.transfer.copying import CopyFailed, Run
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import UcxSettings

pytestmark = pytest.mark.integration

BYTES = 16 << 20
NIC = UcxSettings(device="lo", transports="tcp")
NUMBER = itertools.count()
Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def cache() -> Iterator[Region]:
    with Region(BYTES) as region:
        yield region


@pytest.fixture
def buffer() -> Iterator[Region]:
    with Region(BYTES) as region:
        content(region)[:] = np.random.default_rng(1).integers(0, 256, BYTES, dtype=np.uint8)
        yield region


@pytest.fixture
def engine(cache: Region, buffer: Region) -> Iterator[CnicCopyEngine]:
    engine = CnicCopyEngine(f"loop/{next(NUMBER)}", NIC, [cache, buffer])
    yield engine
    engine.close()


def content(region: Region) -> Bytes:
    return np.frombuffer(region.view(), dtype=np.uint8)


def test_scattered_blocks_arrive_both_ways(
    engine: CnicCopyEngine, cache: Region, buffer: Region
) -> None:
    blocks, size = 200, 20_000
    to = np.random.default_rng(2).permutation(blocks)
    into = [
        Run(buffer.address + index * size, cache.address + int(to[index]) * size, size)
        for index in range(blocks)
    ]
    assert engine.copy(into) == blocks * size
    source = content(buffer)[: blocks * size].reshape(blocks, size)
    target = content(cache)[: blocks * size].reshape(blocks, size)
    assert (target[to] == source).all()
    expected = source.copy()
    source[:] = 0
    assert engine.copy([Run(run.target, run.source, size) for run in into]) == blocks * size
    assert (source == expected).all()
    assert engine.counts.submissions == 2
    assert engine.counts.requests == 2
    assert engine.counts.moved_bytes == 2 * blocks * size


def test_neighbours_are_one_work_request(
    engine: CnicCopyEngine, cache: Region, buffer: Region
) -> None:
    size = 4096
    runs = [Run(buffer.address + i * size, cache.address + i * size, size) for i in range(64)]
    engine.copy(runs)
    assert (engine.counts.requests, engine.counts.ranges) == (1, 1)
    assert (content(cache)[: 64 * size] == content(buffer)[: 64 * size]).all()


def test_more_than_a_window_of_requests(
    engine: CnicCopyEngine, cache: Region, buffer: Region
) -> None:
    size, blocks = 512, 5000
    runs = [
        Run(buffer.address + i * size, cache.address + (blocks - 1 - i) * size, size)
        for i in range(blocks)
    ]
    copy = engine.submit(runs)
    copy.wait(20.0)
    assert engine.counts.requests == -(-blocks // 1024)
    got = content(cache)[: blocks * size].reshape(blocks, size)
    assert (got[::-1] == content(buffer)[: blocks * size].reshape(blocks, size)).all()


def test_memory_that_is_not_ours_is_refused_before_anything_moves(
    engine: CnicCopyEngine, cache: Region, buffer: Region
) -> None:
    good = Run(buffer.address, cache.address, 4096)
    for bad in (
        Run(buffer.address, cache.address + BYTES - 100, 4096),
        Run(16, cache.address, 4096),
    ):
        with pytest.raises(CopyFailed, match="in no region"):
            engine.copy([good, bad])
    assert not content(cache).any()
    assert engine.counts.requests == 0


def test_chosen_by_configuration_on_a_machine_without_gpu(cache: Region, buffer: Region) -> None:
    place = CopyPlace(f"choice/{next(NUMBER)}", NIC, None, [cache], [buffer])
    engine = open_copy_engine("cnic", place)
    try:
        assert isinstance(engine, CnicCopyEngine)
        assert engine.copy([Run(buffer.address, cache.address, 4096)]) == 4096
        assert (content(cache)[:4096] == content(buffer)[:4096]).all()
        assert engine.fence(0) is None
    finally:
        engine.close()


def test_nic_that_is_not_there_is_an_error_that_names_it(cache: Region, buffer: Region) -> None:
    nic = UcxSettings(device="nosuch0")
    place = CopyPlace(f"choice/{next(NUMBER)}", nic, None, [cache], [buffer])
    with pytest.raises(CopyEngineMissing, match=r"engine\.copy: 'cnic'.*nosuch0"):
        open_copy_engine("cnic", place)
