"""Processes killed, stopped and starved while they use a store or a limiter."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import storage_worker as worker

from dualpath.storage import BlockId, Limiter, ReadStatus
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.nixl_module import find_nixl

pytestmark = pytest.mark.fault

needs_nixl = pytest.mark.skipif(find_nixl() is None, reason="NIXL is not installed")
both = pytest.mark.parametrize("io", ["threads", pytest.param("nixl", marks=needs_nixl)])


def start(task: str, path: Path, io: str, argument: object) -> subprocess.Popen[str]:
    command = [sys.executable, worker.__file__, task, str(path), io, str(argument)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def await_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:  # NIXL announces itself on standard output
        if line.strip() == text:
            return
    raise AssertionError(f"the worker ended with {process.wait(10)} before saying {text!r}")


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def leftovers(store: Path) -> list[Path]:
    return [path for path in (store / "tmp").glob("*/*") if path.is_file() and path.name != "hold"]


@both
def test_a_writer_killed_at_any_moment_leaves_whole_blocks_only(tmp_path: Path, io: str) -> None:
    seen_in_the_middle = published = 0
    for attempt in range(12):
        process = start("forever", tmp_path, io, f"{io}{attempt}")
        await_line(process, "ready")
        go(process)
        await_line(process, "0")
        time.sleep(0.0037 * attempt)  # somewhere else in the cycle each time
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        seen_in_the_middle += bool(leftovers(tmp_path))

        with worker.open_store(str(tmp_path), "threads") as store:
            assert leftovers(tmp_path) == []  # opening removed what the dead writer left
            names = [name for _root, name in store.scan(worker.ROOT)]
            slots = aligned_buffers(len(names), worker.LAYOUT.slot_bytes)
            statuses = store.read(worker.ROOT, names, slots, time.monotonic() + 30)
            assert statuses == [ReadStatus.OK] * len(names)
            for name, slot in zip(names, slots, strict=True):
                assert bytes(slot) == worker.content(name)
            assert len(names) >= worker.BATCH
            published += len(names)
            for name in names:
                store.remove(worker.ROOT, name)
        if seen_in_the_middle >= 2 and attempt >= 3:
            break
    assert seen_in_the_middle, "no kill hit a write: the test proves nothing"
    assert published


def test_a_living_writers_files_are_left_alone(tmp_path: Path) -> None:
    process = start("forever", tmp_path, "threads", "alive")
    await_line(process, "ready")
    folders = {path.name for path in (tmp_path / "tmp").iterdir()}
    assert len(folders) == 2  # its folder and its lock
    with worker.open_store(str(tmp_path), "threads"):
        assert folders < {path.name for path in (tmp_path / "tmp").iterdir()}
    process.kill()
    process.wait(10)
    with worker.open_store(str(tmp_path), "threads"):
        assert not folders & {path.name for path in (tmp_path / "tmp").iterdir()}
    assert list((tmp_path / "tmp").iterdir()) == []


@both
def test_two_processes_publish_the_same_blocks(tmp_path: Path, io: str) -> None:
    count = 40
    processes = [start("once", tmp_path, io, count) for _ in range(2)]
    for process in processes:
        await_line(process, "ready")
    for process in processes:
        go(process)
    statuses: list[str] = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        statuses += out.split("\n")[-2].split()
        assert process.returncode == 0
    assert sorted(statuses) == ["present"] * count + ["published"] * count
    with worker.open_store(str(tmp_path), "threads") as store:
        names: list[BlockId] = [name for _root, name in store.scan()]
        assert set(names) == {worker.block(i, "same") for i in range(count)}
        slots = aligned_buffers(count, worker.LAYOUT.slot_bytes)
        assert set(store.read(worker.ROOT, names, slots, time.monotonic() + 30)) == {ReadStatus.OK}
    assert list((tmp_path / "tmp").iterdir()) == []


@both
@pytest.mark.parametrize("limit", [0, 4096, 73 * 4096])
def test_no_room_is_an_outcome_not_an_exception(tmp_path: Path, io: str, limit: int) -> None:
    process = start("limited", tmp_path, io, limit)
    await_line(process, "ready")
    out, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert out.split("\n")[-2].split() == ["full"] * 4 + ["0"]
    with worker.open_store(str(tmp_path), "threads") as store:
        assert list(store.scan()) == []


def test_a_limiter_shared_by_processes_grants_each_moment_once(tmp_path: Path) -> None:
    processes = [start("limiter", tmp_path, "-", 200) for _ in range(2)]
    for process in processes:
        await_line(process, "ready")
    for process in processes:
        go(process)
    finishes: list[float] = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        own = [float(line) for line in out.split()]
        assert own == sorted(own)
        finishes += own
    finishes.sort()
    assert len(finishes) == 400
    # 1,000 bytes at 1 MB/s: no two grants end within a millisecond of each other.
    gaps = [later - earlier for earlier, later in itertools.pairwise(finishes)]
    assert min(gaps) >= 0.001 - 1e-9
    limiter = Limiter.shared(tmp_path, "n0-read", 1e6)
    assert limiter.state().granted_bytes == 400_000
    limiter.close()


def test_a_limiters_holder_may_stop_or_die(tmp_path: Path) -> None:
    holder = start("hold", tmp_path, "-", 0)
    await_line(holder, "held")
    os.kill(holder.pid, signal.SIGSTOP)
    limiter = Limiter.shared(tmp_path, "n0-read", 1e6)
    assert limiter.reserve(1000, time.monotonic() + 0.05) is None  # held: give up in time
    holder.kill()
    holder.wait(10)
    assert limiter.reserve(1000, time.monotonic() + 10) is not None
    assert limiter.state().granted_bytes == 2000
    limiter.close()
