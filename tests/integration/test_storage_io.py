"""The two I/O methods below the store: errors of single blocks, and when memory is free again."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath.storage.blockio import BlockIO, Direction, IoOp
from dualpath.storage.io_nixl import NixlPosixIO
from dualpath.storage.io_threads import ThreadPoolIO
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.nixl_module import find_nixl

pytestmark = pytest.mark.integration

SIZE = 8192
needs_nixl = pytest.mark.skipif(find_nixl() is None, reason="NIXL is not installed")


def make(name: str, batch: int = 8) -> BlockIO:
    if name == "threads":
        return ThreadPoolIO(4)
    nixl = find_nixl()
    assert nixl is not None
    return NixlPosixIO(nixl, batch, lanes=2)


@pytest.fixture(params=["threads", pytest.param("nixl", marks=needs_nixl)])
def io(request: pytest.FixtureRequest) -> Iterator[BlockIO]:
    made = make(request.param)
    yield made
    made.close()


def ops_on(folder: Path, count: int) -> list[IoOp]:
    headers, slots = aligned_buffers(count, 4096), aligned_buffers(count, SIZE)
    ops = []
    for index in range(count):
        headers[index][:] = os.urandom(4096)
        slots[index][:] = os.urandom(SIZE)
        fd = os.open(folder / f"f{index}", os.O_RDWR | os.O_CREAT, 0o666)
        ops.append(IoOp(fd, headers[index], slots[index]))
    return ops


def soon() -> float:
    return time.monotonic() + 20.0


def clear(ops: list[IoOp]) -> list[bytes]:
    before = [bytes(op.header) + bytes(op.slot) for op in ops]
    for op in ops:
        op.header[:] = bytes(4096)
        op.slot[:] = bytes(SIZE)
    return before


def test_each_operation_has_its_own_errno(io: BlockIO, tmp_path: Path) -> None:
    ops = ops_on(tmp_path, 5)
    assert io.transfer(Direction.WRITE, ops, soon()) == [0] * 5
    before = clear(ops)
    os.truncate(tmp_path / "f1", 4096 + 100)  # ends inside the slot
    os.truncate(tmp_path / "f2", 0)
    bad = os.open(tmp_path / "f3", os.O_WRONLY)
    ops[3] = IoOp(bad, ops[3].header, ops[3].slot)
    codes = io.transfer(Direction.READ, ops, soon())
    assert codes == [0, errno.ENODATA, errno.ENODATA, errno.EBADF, 0]
    for index in (0, 4):
        assert bytes(ops[index].header) + bytes(ops[index].slot) == before[index]
    # The method still works after that.
    good = [ops[0], ops[4]]
    clear(good)
    assert io.transfer(Direction.READ, good, soon()) == [0, 0]
    assert bytes(ops[4].slot) == before[4][4096:]


def test_many_callers_at_once(io: BlockIO, tmp_path: Path) -> None:
    results: dict[int, bool] = {}

    def run(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        ops = ops_on(folder, 4)
        fine = io.transfer(Direction.WRITE, ops, soon()) == [0] * 4
        for _ in range(5):
            before = clear(ops)
            fine &= io.transfer(Direction.READ, ops, soon()) == [0] * 4
            fine &= [bytes(op.header) + bytes(op.slot) for op in ops] == before
        results[number] = fine

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(range(6), True)


def aio_contexts() -> int:
    """AIO contexts of this process: the kernel maps one ring for each."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


@needs_nixl
def test_a_lane_that_failed_is_destroyed_before_the_batch_is_done_again(tmp_path: Path) -> None:
    before = aio_contexts()
    io = make("nixl")
    assert isinstance(io, NixlPosixIO)
    assert aio_contexts() == before + 1
    ops = ops_on(tmp_path, 3)
    assert io.transfer(Direction.WRITE, ops, soon()) == [0] * 3
    assert (io.lane_errors, aio_contexts()) == (0, before + 1)
    os.truncate(tmp_path / "f1", 10)
    assert io.transfer(Direction.READ, ops, soon()) == [0, errno.ENODATA, 0]
    # The kernel tears a context down only when nothing is in flight in it.
    assert (io.lane_errors, aio_contexts()) == (1, before)
    assert io.transfer(Direction.READ, [ops[0], ops[2]], soon()) == [0, 0]
    assert (io.lane_errors, aio_contexts()) == (1, before + 1)
    io.close()
    assert aio_contexts() == before


@needs_nixl
def test_no_free_lane_before_the_deadline(tmp_path: Path) -> None:
    nixl = find_nixl()
    assert nixl is not None
    io = NixlPosixIO(nixl, 8, lanes=1)
    ops = ops_on(tmp_path, 2)
    lane = io._tokens.get()
    assert io.transfer(Direction.READ, ops, time.monotonic()) == [errno.ETIMEDOUT] * 2
    io._tokens.put(lane)
    assert io.transfer(Direction.WRITE, ops, soon()) == [0, 0]
    io.close()


def test_a_call_ends_only_when_nothing_of_it_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that answers late: the deadline stops what has not begun, never what has."""
    release, begun = threading.Event(), []

    def slow(direction: Direction, op: IoOp) -> int:
        begun.append(op.fd)
        release.wait(20)
        op.slot[:1] = b"x"
        return 0

    monkeypatch.setattr("dualpath.storage.io_threads.run_op", slow)
    io = ThreadPoolIO(2)
    ops = ops_on(tmp_path, 5)
    results: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: results.append(io.transfer(Direction.READ, ops, time.monotonic() + 0.05))
    )
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()  # long past its deadline, two operations hold it
    release.set()
    thread.join(20)
    assert sorted(results[0]) == [0, 0] + [errno.ETIMEDOUT] * 3
    assert len(begun) == 2
    io.close()
