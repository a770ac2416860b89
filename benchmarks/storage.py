"""The store's reads and writes against fio on the same file system.

    python benchmarks/storage.py --json

For blocks of 1 and 4 MiB, NIXL and threads, O_DIRECT and page cache: GB/s of ``BlockStore.write``
and ``.read``, called as an engine does (one thread, batch after batch), beside fio with the same
bytes, block size and queue depth, files of one block each, created in the run (``files``), and
beside fio on one large file that exists already (``stream``: what the device does when no file is
made). NIXL is compared with fio's libaio at the batch's depth, threads with psync in as many
threads. With ``fsync``, fio syncs every file, too. Reads are of what is not in the page cache.

Also: milliseconds a block for fsync, and the time to open a store of 100,000 blocks.

fio is a program of its own (Debian: ``apt-get install fio``); without it those columns are empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Sample, alternate, arguments, finish, machine, median, paired_ratio, say, table
from dualpath.blocks import BlockLayout
from dualpath.storage import BlockId, BlockStore, ReadStatus, UnsupportedIoError, WriteStatus
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.io_threads import DEFAULT_THREADS
from dualpath.storage.memory import aligned_buffers
from dualpath.storage.paths import block_path

ROOT = hashlib.sha256(b"benchmark").digest()
TARGET = 0.9
OPEN_TARGET_S = 3.0
DEADLINE_S = 120.0
MANY_LAYOUT = BlockLayout(1, 64, 64, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One way of doing it."""

    block_bytes: int
    io: str
    direct: bool
    fsync: bool = False


def layout_of(block_bytes: int) -> BlockLayout:
    """A geometry whose Full Block has ``block_bytes``."""
    return BlockLayout(16, 64, 64, block_bytes // (16 * 64))


def chain(count: int, salt: str) -> list[BlockId]:
    """Names of a chain of blocks."""
    parent, blocks = ROOT, []
    for number in range(count):
        key = hashlib.sha256(f"{salt}/{number}".encode()).digest()
        blocks.append(BlockId(key, parent))
        parent = key
    return blocks


class Ours:
    """A store and as many blocks as are written and read in a round."""

    def __init__(self, folder: Path, case: Case, total_bytes: int, batch: int) -> None:
        self.case = case
        self.path = folder / "store"
        self.batch = batch
        self.layout = layout_of(case.block_bytes)
        self.blocks = chain(total_bytes // case.block_bytes, "blocks")
        self.slots = aligned_buffers(batch, self.layout.slot_bytes)
        for slot in self.slots:
            slot[:] = os.urandom(1 << 16) * (len(slot) >> 16)
        self.store = BlockStore.open(
            self.path, self.layout, io=case.io, direct="on" if case.direct else "off",
            fsync=case.fsync, batch_blocks=batch,
        )  # fmt: skip
        self.write()  # makes the folders, which a store in use has already

    def write(self) -> Sample:
        """Publish every block anew."""
        for block in self.blocks:
            self.store.remove(ROOT, block)
        return self._timed(self.store.write, WriteStatus.PUBLISHED)

    def read(self) -> Sample:
        """Read and verify every block."""
        drop_cache(block_path(self.path, ROOT, block) for block in self.blocks)
        return self._timed(self.store.read, ReadStatus.OK)

    def _timed(self, call: Callable[..., list[Any]], good: ReadStatus | WriteStatus) -> Sample:
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        for start in range(0, len(self.blocks), self.batch):
            part = self.blocks[start : start + self.batch]
            deadline = time.monotonic() + DEADLINE_S
            statuses = call(ROOT, part, self.slots[: len(part)], deadline)
            if any(status is not good for status in statuses):
                raise RuntimeError(f"not all blocks are {good.value}: {statuses}")
        took_s = time.perf_counter() - begin_s
        nbytes = len(self.blocks) * (HEADER_BYTES + self.layout.slot_bytes)
        return {
            "gbs": nbytes / took_s / 1e9,
            "ms_per_block": took_s / len(self.blocks) * 1e3,
            "cpu_s_per_gb": (time.process_time() - cpu_s) / nbytes * 1e9,
        }

    def close(self) -> None:
        """Close and delete."""
        self.store.close()
        shutil.rmtree(self.path)


def drop_cache(paths: Iterator[Path]) -> None:
    """Put files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Fio:
    """fio doing the same."""

    def __init__(self, program: str, folder: Path, case: Case, total: int, batch: int) -> None:
        self._program = program
        self._case = case
        self._folder = folder
        self._total = total
        self._batch = batch

    def files(self, op: str) -> Sample:
        """One file a block, made in the run when ``op`` is write."""
        case = self._case
        jobs = 1 if case.io == "nixl" else DEFAULT_THREADS
        folder = self._folder / "fio-files"
        if op == "write":
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        options = [
            f"--nrfiles={self._total // case.block_bytes // jobs}",
            f"--filesize={case.block_bytes}",
            f"--openfiles={max(1, self._batch // jobs)}",
            "--file_service_type=roundrobin",
        ]
        if op == "write":
            options.append("--create_on_open=1")
        if case.fsync:
            options.append("--fsync_on_close=1" if case.io == "nixl" else "--fsync=1")
        return self._run(folder, op, jobs, options)

    def stream(self, op: str) -> Sample:
        """One file that is there already."""
        folder = self._folder / "fio-stream"
        if not folder.exists():
            folder.mkdir()
            self._run(folder, "write", 1, [f"--filesize={self._total}", "--filename=stream"])
        jobs = 1 if self._case.io == "nixl" else DEFAULT_THREADS
        share = self._total // jobs
        options = [f"--filesize={self._total}", "--filename=stream", f"--offset_increment={share}"]
        return self._run(folder, op, jobs, options)

    def _run(self, folder: Path, op: str, jobs: int, options: list[str]) -> Sample:
        case = self._case
        command = [
            self._program, "--name=block", f"--directory={folder}", "--thread",
            "--output-format=json", "--group_reporting", f"--rw={op}", f"--bs={case.block_bytes}",
            f"--size={self._total // jobs}", f"--numjobs={jobs}", f"--direct={int(case.direct)}",
            *(["--ioengine=libaio", f"--iodepth={self._batch}"] if case.io == "nixl"
              else ["--ioengine=psync"]),
            *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved = job[op]
        if moved["io_bytes"] != self._total:
            raise RuntimeError(f"fio moved {moved['io_bytes']} bytes, not {self._total}")
        gbs = moved["io_bytes"] / (moved["runtime"] / 1e3) / 1e9
        return {"gbs": gbs}

    def close(self) -> None:
        """Delete its files."""
        for name in ("fio-files", "fio-stream"):
            shutil.rmtree(self._folder / name, ignore_errors=True)


def measure(
    folder: Path, case: Case, fio: str | None, total: int, batch: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows for writing and reading in one way."""
    ours = Ours(folder, case, total, batch)
    theirs = Fio(fio, folder, case, total, batch) if fio else None
    rows = []
    try:
        for op in ("write",) if case.fsync else ("write", "read"):
            sides: dict[str, Callable[[], Sample]] = {
                "store": ours.write if op == "write" else ours.read
            }
            if theirs is not None:
                sides["files"] = lambda op=op: theirs.files(op)  # type: ignore[misc]
                if not case.fsync:
                    sides["stream"] = lambda op=op: theirs.stream(op)  # type: ignore[misc]
            samples = alternate(sides, rounds)
            row: dict[str, Any] = {
                "op": op, "block_bytes": case.block_bytes, "io": case.io, "direct": case.direct,
                "fsync": case.fsync, "gbs": median(samples["store"], "gbs"),
                "cpu_s_per_gb": median(samples["store"], "cpu_s_per_gb"),
            }  # fmt: skip
            for side in list(sides)[1:]:
                row[f"fio_{side}_gbs"] = median(samples[side], "gbs")
                row[f"of_{side}"] = paired_ratio(samples["store"], samples[side], "gbs")
            if theirs is not None:
                row["met"] = row["of_files"] >= TARGET
            rows.append(row)
    finally:
        ours.close()
        if theirs is not None:
            theirs.close()
    return rows


def fsync_cost(folder: Path, block_bytes: int, total: int, batch: int, rounds: int) -> Sample:
    """Milliseconds a block with and without fsync, in turns."""
    stores = {
        name: Ours(folder / name, Case(block_bytes, "auto", True, name == "on"), total, batch)
        for name in ("on", "off")
    }
    try:
        samples = alternate({name: store.write for name, store in stores.items()}, rounds)
    finally:
        for store in stores.values():
            store.close()
    return {
        "on_ms_per_block": median(samples["on"], "ms_per_block"),
        "off_ms_per_block": median(samples["off"], "ms_per_block"),
        "ratio": paired_ratio(samples["on"], samples["off"], "ms_per_block"),
    }


def open_many(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Seconds to open a store of ``count`` blocks and list it (what the front does at its start),
    and to open it with a capacity, first without its account and then with it; on the wall, and
    of CPU, which hardly depends on what else the machine does."""
    path = folder / "many"
    with BlockStore.open(path, MANY_LAYOUT, io="threads") as store:
        del store
    size = HEADER_BYTES + MANY_LAYOUT.slot_bytes
    made: set[Path] = set()
    for block in chain(count, "many"):
        file = block_path(path, ROOT, block)
        if file.parent not in made:
            file.parent.mkdir(parents=True, exist_ok=True)
            made.add(file.parent)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.ftruncate(fd, size)
        os.close(fd)

    def listed(capacity_bytes: int) -> Sample:
        begin, cpu = time.perf_counter(), time.process_time()
        with BlockStore.open(
            path, MANY_LAYOUT, io="threads", capacity_bytes=capacity_bytes
        ) as store:
            opened = time.perf_counter()
            found = sum(1 for _ in store.scan())
            if found != count:
                raise RuntimeError(f"{found} blocks found of {count}")
            return {
                "open_s": opened - begin,
                "open_and_list_s": time.perf_counter() - begin,
                "cpu_s": time.process_time() - cpu,
            }

    plain = [listed(0) for _ in range(rounds)]
    first = listed(2 * count * size)
    again = [listed(2 * count * size) for _ in range(rounds)]
    shutil.rmtree(path)
    times = {
        "open_and_list_s": median(plain, "open_and_list_s"),
        "capacity_first_s": first["open_and_list_s"],
        "capacity_again_s": median(again, "open_and_list_s"),
    }
    met = max(times.values()) < OPEN_TARGET_S
    cpu = {
        "open_and_list_cpu_s": median(plain, "cpu_s"),
        "capacity_first_cpu_s": first["cpu_s"],
        "capacity_again_cpu_s": median(again, "cpu_s"),
    }
    return {"blocks": count, **times, **cpu, "target_s": OPEN_TARGET_S, "met": met}


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that goes at the end."""
    folder = Path(tempfile.mkdtemp(prefix="dualpath-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()),
                        help="folder on the file system to measure")  # fmt: skip
    parser.add_argument("--block-mib", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--total-mib", type=int, default=512, help="bytes of a measurement")
    parser.add_argument("--batch", type=int, default=32, help="blocks in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io", nargs="+", default=["nixl", "threads"])
    parser.add_argument("--direct", choices=["on", "off", "both"], default="both")
    parser.add_argument("--many", type=int, default=100_000, help="0: do not open a large store")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "batch": args.batch, "rounds": args.rounds}
    fio = shutil.which("fio")
    result["fio"] = (
        subprocess.run([fio, "--version"], capture_output=True, text=True).stdout.strip()
        if fio else "not installed (Debian: apt-get install fio): its columns are empty"
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    skipped = []
    total = args.total_mib << 20
    with scratch(args.dir) as folder:
        for block in (mib << 20 for mib in args.block_mib):
            for io in args.io:
                for direct in {"on": [True], "off": [False], "both": [True, False]}[args.direct]:
                    for fsync in (False, True):
                        case = Case(block, io, direct, fsync)
                        say(str(case))
                        try:
                            rows += measure(folder, case, fio, total, args.batch, args.rounds)
                        except UnsupportedIoError as error:
                            skipped.append({"case": str(case), "reason": str(error)})
        say("fsync")
        for name in ("on", "off"):
            (folder / name).mkdir()
        result["fsync"] = {
            str(mib): fsync_cost(folder, mib << 20, total, args.batch, args.rounds)
            for mib in args.block_mib
        }
        if args.many:
            say(f"a store of {args.many:,} blocks")
            result["open"] = open_many(folder, args.many, min(3, args.rounds))
    result |= {"rows": rows, "skipped": skipped}
    table(rows, ["op", "block_bytes", "io", "direct", "fsync", "gbs", "cpu_s_per_gb",
                 "fio_files_gbs", "of_files", "fio_stream_gbs", "of_stream", "met"])  # fmt: skip
    print("fsync:", json.dumps(result["fsync"]))
    print("open:", json.dumps(result.get("open")))
    finish(result, args.json)


if __name__ == "__main__":
    main()
