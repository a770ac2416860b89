"""Writers of a store with a capacity, killed and stopped: the limit holds and nothing leaks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import capacity_worker as worker
import pytest

from dualpath.storage import BlockId, ReadStatus, WriteStatus
from dualpath.storage.books import LedgerFile
from dualpath.storage.capacity import Ledger
from dualpath.storage.forest import Forest
from dualpath.storage.memory import aligned_buffers

pytestmark = pytest.mark.fault

CAPACITY = 24 * worker.FILE_BYTES + 1000


def start(path: Path, salt: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, worker.__file__, str(path), str(CAPACITY), salt],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> str:
    process.kill()
    out, _ = process.communicate(timeout=20)
    return out


def soon() -> float:
    return time.monotonic() + 20


def check_settled(path: Path) -> list[BlockId]:
    """When every writer is gone: the next one finds right books, whole blocks and whole chains."""
    with worker.open_store(str(path), CAPACITY) as store:
        with closing(Ledger.visit(path)) as ledger:
            totals = ledger.usage(soon())
        files = Forest.scan(path)
        assert (totals.published_bytes, totals.reserved_bytes) == (files.total_bytes, 0)
        assert files.total_bytes <= CAPACITY
        assert len(files.reachable()) == len(files.files)
        names = [file.block for file in files.files.values()]
        slots = aligned_buffers(max(1, len(names)), worker.LAYOUT.slot_bytes)[: len(names)]
        statuses = store.read(worker.ROOT, names, slots, soon())
        assert statuses == [ReadStatus.OK] * len(names)
        for name, slot in zip(names, slots, strict=True):
            assert bytes(slot) == worker.content(name)
        # All of the capacity can be used: nothing a dead writer held is missing.
        fresh = worker.chain(24, f"fresh{time.monotonic()}")
        slots = aligned_buffers(24, worker.LAYOUT.slot_bytes)
        for block, slot in zip(fresh, slots, strict=True):
            slot[:] = worker.content(block)
        assert store.write(worker.ROOT, fresh, slots, soon()) == [WriteStatus.PUBLISHED] * 24
    assert not list((path / "tmp").iterdir())
    return names


def test_writers_killed_at_any_moment(tmp_path: Path) -> None:
    survivor = start(tmp_path, "survivor")
    in_the_middle = 0
    for attempt in range(14):
        victim = start(tmp_path, f"victim{attempt}")
        time.sleep(0.05 + 0.0037 * attempt)
        victim.kill()
        victim.wait(10)
        in_the_middle += any(tmp_path.glob(f"tmp/{victim.pid}-*/[0-9]*"))
        with closing(Ledger.visit(tmp_path)) as ledger:
            found = ledger.usage(soon())
            assert found.published_bytes + found.reserved_bytes <= CAPACITY
    assert in_the_middle, "no kill hit a write: the test proves nothing"
    out = kill(survivor)
    # It went on all the time, and made room for itself beside the dead.
    assert out.count("'published': 12") > 14
    assert "failed" not in out and "expired" not in out
    check_settled(tmp_path)


def test_all_writers_killed_together_again_and_again(tmp_path: Path) -> None:
    for attempt in range(4):
        writers = [start(tmp_path, f"{attempt}{salt}") for salt in "ab"]
        time.sleep(0.2 + 0.013 * attempt)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.wait(10)
        assert check_settled(tmp_path)


def test_a_writer_killed_between_two_names_is_counted(tmp_path: Path) -> None:
    """The worst moment, made to happen: names are changed, the books not."""
    with worker.open_store(str(tmp_path), CAPACITY) as store:
        blocks = worker.chain(6, "x")
        slots = aligned_buffers(6, worker.LAYOUT.slot_bytes)
        for block, slot in zip(blocks, slots, strict=True):
            slot[:] = worker.content(block)
        assert set(store.write(worker.ROOT, blocks, slots, soon())) == {WriteStatus.PUBLISHED}
    pid = os.fork()
    if pid == 0:
        with closing(Ledger.visit(tmp_path)) as ledger, ledger.changing(soon()):
            Path(next(tmp_path.glob(f"blocks/*/*/{blocks[5].key.hex()}.*"))).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with closing(LedgerFile(tmp_path)) as books:
        books.lock(soon())
        totals = books.load()
        books.unlock()
    assert totals is not None
    assert (totals.dirty, totals.published_bytes) == (True, 6 * worker.FILE_BYTES)
    with closing(Ledger.visit(tmp_path)) as ledger:
        assert ledger.usage(soon()).published_bytes == 5 * worker.FILE_BYTES
    check_settled(tmp_path)


def test_a_stopped_writer_keeps_its_room_and_may_go_on(tmp_path: Path) -> None:
    stopped, other = start(tmp_path, "stopped"), start(tmp_path, "other")
    for pause in range(5):
        time.sleep(0.1 + 0.0041 * pause)
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(0.15)
        with closing(LedgerFile(tmp_path)) as books:
            try:
                books.lock(time.monotonic() + 0.05)
            except TimeoutError:
                pass  # it was stopped while it held the books: the others wait, until a deadline
            else:
                totals = books.load()
                books.unlock()
                assert totals is not None
                assert totals.published_bytes + totals.reserved_bytes <= CAPACITY
        stopped.send_signal(signal.SIGCONT)
    for process in (stopped, other):
        out = kill(process)
        assert "'published'" in out
        assert "failed" not in out
    check_settled(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose use can be read at one moment, with room for all but the blocks."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def log_bytes(path: Path) -> int:
    return (path / "capacity" / "log").stat().st_blocks * 512


@pytest.mark.root
def test_the_file_system_never_holds_more(small_disk: Path) -> None:
    """Measured by the file system itself, which also counts files that are open and unlinked."""
    writers = [start(small_disk, salt) for salt in "ab"]
    samples = []
    for attempt in range(3):
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            before, use, after = (
                log_bytes(small_disk),
                os.statvfs(small_disk),
                log_bytes(small_disk),
            )
            beside = max(before, after)  # it may be begun afresh between two looks
            samples.append((use.f_blocks - use.f_bfree) * use.f_frsize - beside)
            time.sleep(0.001)
        kill(writers.pop())
        writers.append(start(small_disk, f"again{attempt}"))
    for writer in writers:
        kill(writer)
    # Beside the blocks: ledger, and the holds of two writers and two dead ones at most.
    assert max(samples) <= CAPACITY + 4096 + 4 * (16 << 10)
    assert max(samples) > CAPACITY - 2 * worker.FILE_BYTES
    check_settled(small_disk)


@pytest.mark.root
def test_a_disk_smaller_than_the_capacity(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(path)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    try:
        with worker.open_store(str(path), CAPACITY) as store:
            outcomes: list[WriteStatus] = []
            slots = aligned_buffers(4, worker.LAYOUT.slot_bytes)
            for turn in range(6):
                blocks = worker.chain(4, f"{turn}")
                for block, slot in zip(blocks, slots, strict=True):
                    slot[:] = worker.content(block)
                outcomes += store.write(worker.ROOT, blocks, slots, soon())
            assert set(outcomes) == {WriteStatus.PUBLISHED}
            counters = store.counters()
            assert counters["storage_disk_full_bytes"] == counters["storage_evicted_bytes"] > 0
            files = Forest.scan(path)
            assert len(files.reachable()) == len(files.files)
            # A full disk has no room for the log either; removing must work all the same.
            with closing(Ledger.visit(path)) as ledger:
                done = ledger.shrink(worker.FILE_BYTES, float("inf"), soon())
                assert done.left_bytes == worker.FILE_BYTES
            again = store.write(worker.ROOT, blocks, slots, soon())
            assert set(again) <= {WriteStatus.PUBLISHED, WriteStatus.PRESENT}
            totals_of = Forest.scan(path).total_bytes
            with closing(Ledger.visit(path)) as ledger:
                assert ledger.usage(soon()).published_bytes == totals_of
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
