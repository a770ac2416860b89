"""What a block costs by how many go in one submission, through our agent and with NIXL called bare.

    python benchmarks/batching.py --json

Two processes on this machine over loopback TCP (``TLS=tcp``). The writer submits ``count`` blocks
of one size and waits until the other side's memory holds them; the target is the same agent process
in all cases. Microseconds of wall time and of the writer's CPU (user and system) per block.

``bare`` is what a program that calls NIXL itself would do: two descriptor lists from an array, one
request, post, then ask without pause until it is done. ``prepped`` does the same by indices into
lists prepared beforehand. ``ours`` is ``PeerAgent.write`` as the traffic manager calls it: checks,
merging, turns between transfers, deadline, and an event loop that sleeps while the NIC works.

``scattered`` blocks are neighbours on neither side; ``contiguous`` ones on both, and ours are
merged.

``overhead`` is ours / bare, median of the rounds' own ratios. ``met``: scattered, from
``--from-count`` blocks a submission on, ours costs no more than ``--most`` times bare in CPU (wall
time on a shared machine is mostly waiting for the other process's turn).

The second table is the copy between buffers and cache, in this process: the ``host`` copy engine
against ``ctypes.memmove`` in a loop, alone and beside a thread that is busy in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing as mp
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from common import Sample, alternate, arguments, finish, machine, median, paired_ratio, say
from dualpath.storage.nixl_module import Nixl, find_nixl
from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.copy_host import HostCopyEngine
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import UcxSettings

MEMORY_BYTES = 256 << 20
TIMEOUT_S = 60.0
SETTINGS = UcxSettings(device="lo", transports="tcp")
U64 = npt.NDArray[np.uint64]


# ---- the target's process ---------------------------------------------------------------------


def serve(conn: Connection) -> None:
    """An agent that lends its memory until the pipe closes."""

    async def main() -> None:
        ended = asyncio.Event()
        with Region(MEMORY_BYTES, populate=True) as region:
            async with PeerAgent(f"target/{os.getpid()}", device="lo", transports="tcp") as agent:
                agent.register(region)
                conn.send((agent.name, agent.metadata(), region.address))
                asyncio.get_running_loop().add_reader(conn.fileno(), ended.set)
                await ended.wait()
                asyncio.get_running_loop().remove_reader(conn.fileno())

    asyncio.run(main())


@dataclass(frozen=True, slots=True)
class Target:
    """The other side, as the writer knows it."""

    name: str
    metadata: bytes
    address: int


@contextlib.contextmanager
def target_process() -> Iterator[Target]:
    """Start the other side, and end it."""
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            raise RuntimeError("the target process did not start")
        yield Target(*ours.recv())
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()


# ---- one shape of submission ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """``count`` blocks of ``size`` bytes; block ``i`` is at ``places[i]`` of each memory."""

    size: int
    count: int
    scattered: bool
    local_places: U64
    remote_places: U64


def shape(size: int, count: int, scattered: bool) -> Shape:
    """Places in memory. More blocks than fit come back to the same places."""
    slots = MEMORY_BYTES // size
    if scattered:
        rng = np.random.default_rng(size + count)
        pair = [np.resize(rng.permutation(slots), count) for _ in range(2)]
    else:
        pair = [np.arange(count) % slots, np.arange(count) % slots]
    local, remote = ((places * size).astype(np.uint64) for places in pair)
    return Shape(size, count, scattered, local, remote)


def measured(work: Callable[[], None], shape: Shape, repeats: int) -> Sample:
    """Microseconds per block, mean of some submissions in a row."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        work()
    blocks = repeats * shape.count / 1e6
    return {
        "wall_us": (time.perf_counter() - wall) / blocks,
        "cpu_us": (time.process_time() - cpu) / blocks,
    }


class Bare:
    """NIXL without us."""

    def __init__(self, nixl: Nixl, region: Region, target: Target) -> None:
        # As our own agents do: UCX's RDMA modules crash some processes at their exit.
        os.environ.setdefault("UCX_MODULES", "^ib")
        config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self.agent: Any = nixl.api.nixl_agent(f"bare/{os.getpid()}", config)
        self.agent.create_backend("UCX", {"engine_config": SETTINGS.engine_config()})
        rows = [(region.address, region.nbytes, 0, "")]
        self._registered = self.agent.register_memory(rows, "DRAM")
        self.agent.add_remote_agent(target.metadata)
        self._region, self._target = region, target

    def rows(self, base: int, places: U64, size: int) -> U64:
        """A descriptor list's array."""
        rows = np.zeros((len(places), 3), dtype=np.uint64)
        rows[:, 0] = places + np.uint64(base)
        rows[:, 1] = size
        return rows

    def _finish(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a bare transfer ended as {state}")
        handle.release()

    def write(self, shape: Shape) -> None:
        """One request, lists and all."""
        local = self.rows(self._region.address, shape.local_places, shape.size)
        remote = self.rows(self._target.address, shape.remote_places, shape.size)
        self._finish(
            self.agent.initialize_xfer(
                "WRITE",
                self.agent.get_xfer_descs(local, "DRAM"),
                self.agent.get_xfer_descs(remote, "DRAM"),
                self._target.name,
            )
        )

    @contextlib.contextmanager
    def prepped(self, shape: Shape) -> Iterator[Callable[[], None]]:
        """Prepare lists of all places; what is yielded writes by index."""
        places = np.arange(MEMORY_BYTES // shape.size, dtype=np.uint64) * np.uint64(shape.size)
        local = self.agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self.rows(self._region.address, places, shape.size), "DRAM"
        )
        remote = self.agent.prep_xfer_dlist(
            self._target.name, self.rows(self._target.address, places, shape.size), "DRAM"
        )
        ours = (shape.local_places // shape.size).astype(np.int32)
        theirs = (shape.remote_places // shape.size).astype(np.int32)

        def write() -> None:
            self._finish(self.agent.make_prepped_xfer("WRITE", local, ours, remote, theirs))

        try:
            yield write
        finally:
            # Lists that outlive their agent end the process.
            local.release()
            remote.release()

    def close(self) -> None:
        """Destroy the agent, before its memory goes."""
        self.agent.deregister_memory(self._registered)
        self.agent.agent = None


class Ours:
    """The transfer agent, on a loop of its own as in an engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, agent: PeerAgent, region: Region) -> None:
        self._loop, self._agent, self._region = loop, agent, region

    def write(self, shape: Shape, target: Target, repeats: int) -> Sample:
        """Submissions one after the other."""
        local = shape.local_places + np.uint64(self._region.address)
        remote = shape.remote_places + np.uint64(target.address)

        async def submissions() -> None:
            for _ in range(repeats):
                await self._agent.submit(Op.WRITE, target.name, local, remote, shape.size).wait(
                    TIMEOUT_S
                )

        return measured(
            lambda: self._loop.run_until_complete(submissions()),
            Shape(shape.size, shape.count * repeats, shape.scattered, local, remote),
            1,
        )


@contextlib.asynccontextmanager
async def our_agent(region: Region, target: Target) -> AsyncIterator[PeerAgent]:
    """An agent that knows the target."""
    async with PeerAgent(f"ours/{os.getpid()}", device="lo", transports="tcp") as agent:
        agent.register(region)
        agent.metadata()
        agent.add_peer(target.name, target.metadata)
        yield agent


def transfers(args: Any) -> list[dict[str, Any]]:
    """The first table."""
    nixl = find_nixl()
    if nixl is None:
        raise SystemExit("batching: NIXL is not installed")
    rows = []
    loop = asyncio.new_event_loop()
    with target_process() as target, Region(MEMORY_BYTES, populate=True) as region:
        bare = Bare(nixl, region, target)
        context = our_agent(region, target)
        ours = Ours(loop, loop.run_until_complete(context.__aenter__()), region)
        try:
            for size in args.sizes:
                for count in args.counts:
                    for scattered in (True, False):
                        row = one_row(args, bare, ours, target, shape(size, count, scattered))
                        rows.append(row)
        finally:
            loop.run_until_complete(context.__aexit__(None, None, None))
            loop.close()
            bare.close()
    return rows


def one_row(args: Any, bare: Bare, ours: Ours, target: Target, shape: Shape) -> dict[str, Any]:
    """All ways of one shape, in turn."""
    repeats = max(1, min(256, args.round_mib * (1 << 20) // (shape.size * shape.count)))
    repeats = max(repeats, 1 if shape.size * shape.count > 64 << 20 else 4)
    sides: dict[str, Callable[[], Sample]] = {
        "ours": lambda: ours.write(shape, target, repeats),
        "bare": lambda: measured(lambda: bare.write(shape), shape, repeats),
    }
    with bare.prepped(shape) as prepped:
        sides["prepped"] = lambda: measured(prepped, shape, repeats)
        for side in sides.values():
            side()  # connections, pages, caches
        samples = alternate(sides, args.rounds)
    row: dict[str, Any] = {
        "size_bytes": shape.size,
        "count": shape.count,
        "scattered": shape.scattered,
        "overhead_wall": round(paired_ratio(samples["ours"], samples["bare"], "wall_us"), 3),
        "overhead_cpu": round(paired_ratio(samples["ours"], samples["bare"], "cpu_us"), 3),
    }
    for name in sides:
        for key in ("wall_us", "cpu_us"):
            row[f"{name}_{key}"] = round(median(samples[name], key), 2)
    pattern = "scattered" if shape.scattered else "contiguous"
    say(
        f"{shape.size >> 10:5d} KiB x {shape.count:4d} {pattern:10s} "
        f"wall {row['ours_wall_us']:8.1f} / {row['bare_wall_us']:8.1f} us "
        f"({row['overhead_wall']:.2f}x)  cpu {row['ours_cpu_us']:8.1f} / "
        f"{row['bare_cpu_us']:8.1f} us ({row['overhead_cpu']:.2f}x)"
    )
    return row


# ---- copies in host memory --------------------------------------------------------------------


def memmoves(pairs: list[tuple[int, int]], size: int) -> None:
    """The plain way."""
    for target, source in pairs:
        ctypes.memmove(target, source, size)


def copies(args: Any) -> list[dict[str, Any]]:
    """The second table."""
    rows = []
    source, target = (np.ones(MEMORY_BYTES, np.uint8) for _ in range(2))
    engine = HostCopyEngine()
    for size in (4 << 10, 16 << 10, 64 << 10, 256 << 10):
        for count in (16, 512):
            one = shape(size, min(count, MEMORY_BYTES // size), True)
            sources = one.local_places + np.uint64(source.ctypes.data)
            targets = one.remote_places + np.uint64(target.ctypes.data)
            arrays = Descriptors(sources, targets, np.full(one.count, size, dtype=np.uint64))
            pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
            sides = {
                "host": partial(measured, partial(engine.copy, arrays), one, 4),
                "memmove": partial(measured, partial(memmoves, pairs, size), one, 4),
            }
            row: dict[str, Any] = {"size_bytes": size, "count": one.count}
            for busy in (False, True):
                with busy_thread() if busy else contextlib.nullcontext():
                    samples = alternate(sides, args.rounds)
                for name, values in samples.items():
                    key = f"{name}{'_beside_python' if busy else ''}_us"
                    row[key] = round(median(values, "wall_us"), 2)
            rows.append(row)
            say(f"host copy {size >> 10} KiB x {one.count}: {row}")
    return rows


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that never gives the interpreter away by itself, as a model thread may be."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def numbers(text: str) -> list[int]:
    """``1,16,64`` as a list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--counts", type=numbers, default=[1, 16, 64, 512, 2048])
    parser.add_argument("--sizes", type=numbers, default=[4 << 10, 64 << 10, 256 << 10, 1 << 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--round-mib", type=int, default=16, help="about so much is moved per side and round"
    )
    parser.add_argument("--from-count", type=int, default=16)
    parser.add_argument("--most", type=float, default=1.2)
    args = parser.parse_args()
    rows = transfers(args)
    judged = [row for row in rows if row["scattered"] and row["count"] >= args.from_count]
    result = {
        "benchmark": "batching",
        "machine": machine(),
        "transfers": rows,
        "host_copies": copies(args),
        "worst_overhead_wall": max(row["overhead_wall"] for row in judged),
        "worst_overhead_cpu": max(row["overhead_cpu"] for row in judged),
        "met": all(row["overhead_cpu"] <= args.most for row in judged),
    }
    finish(result, args.json)


if __name__ == "__main__":
    main()
