"""Host-device copies by each copy engine: do they keep bytes and order, and what do they cost?

    python benchmarks/copy_engines.py --json              # what this machine has
    python benchmarks/copy_engines.py --check --nic mlx5_0:1 --require cuda,cnic   # a GPU node

``host`` runs everywhere. ``cuda`` needs a GPU (and torch, for memory and for work to collide with),
``cnic`` a GPU and the RDMA NIC beside it (``--nic``). Without an RDMA NIC ``cnic`` is run as a loop
over TCP between host memories, named ``cnic-tcp``: it shows that the engine works, its figures say
nothing about a NIC. What could not run is listed under ``not_run`` with the reason; ``--require``
makes that an error.

Checks, all of them on bytes:
  both_ways   scattered and neighbouring blocks into the cache and back are what they were;
  order       on a GPU: two regions take turns for many layers; each is loaded, changed by a kernel
              that runs behind a long computation, and exported, everything queued at once; every
              layer must have seen its own bytes and been exported after its kernel;
  host_order  the same, but the host waits for each load (as a layer's wait does);
  nic_carried on an RDMA NIC: counters of the NIC grew by what was copied, where it has such
              counters (``cannot tell`` where not: some NICs do not count what they send to
              themselves).

Figures: microseconds per block and GB/s (1e9) of one submission, by block size and blocks a
submission.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import alternate, arguments, finish, machine, median, say, table
from dualpath.transfer.copy_choice import CopyEngineMissing, CopyPlace, open_copy_engine
from dualpath.transfer.copying import Copy, CopyEngine
from dualpath.transfer.cuda_driver import CudaMissing, LibCuda
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import UcxSettings

try:
    import torch
except ImportError:
    torch = None

MEMORY_BYTES = 256 << 20
LAYERS = 200
REGION_BYTES = 8 << 20
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20)
COUNTS = (1, 16, 64, 512, 2048)
Bytes = npt.NDArray[np.uint8]


@dataclass
class Bench:
    """An engine with a cache and a buffer of ``MEMORY_BYTES`` each."""

    name: str
    engine: CopyEngine
    cache: Region
    buffer: Region
    tensor: Any = None
    """The cache as a torch tensor; None when it is host memory."""

    @property
    def host(self) -> Bytes:
        """The buffer's bytes."""
        return np.frombuffer(self.buffer.view(), dtype=np.uint8)

    def device(self) -> Bytes:
        """A copy of the cache's bytes, not made by the engine."""
        if self.tensor is None:
            return np.frombuffer(self.cache.view(), dtype=np.uint8).copy()
        torch.cuda.synchronize()
        return np.asarray(self.tensor.cpu().numpy())

    def clear_device(self) -> None:
        """Zero the cache."""
        if self.tensor is None:
            np.frombuffer(self.cache.view(), dtype=np.uint8)[:] = 0
        else:
            self.tensor.zero_()
            torch.cuda.synchronize()


def ranges(source: npt.NDArray[Any], target: npt.NDArray[Any], size: int) -> Descriptors:
    """Blocks of one size, joined where they are neighbours."""
    return Descriptors(
        source.astype(np.uint64),
        target.astype(np.uint64),
        np.full(len(source), size, dtype=np.uint64),
    ).merged()


# ---- what is there ----------------------------------------------------------------------------


@contextlib.contextmanager
def opened(name: str, nic: str, gpu: int | None) -> Iterator[Bench]:
    """An engine ready to be measured.

    Raises:
        CopyEngineMissing: not on this machine.
    """
    tensor = None
    if gpu is not None:
        tensor = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
        torch.cuda.synchronize()
        cache = Region.borrowed(tensor.data_ptr(), MEMORY_BYTES, tensor, gpu)
    else:
        cache = Region(MEMORY_BYTES, populate=True)
    with cache, Region(MEMORY_BYTES, populate=True) as buffer:
        settings = UcxSettings(nic) if nic else UcxSettings("lo", transports="tcp")
        place = CopyPlace(f"bench-{name}/{os.getpid()}", settings, gpu, [cache], [buffer])
        kind = "cnic" if name.startswith("cnic") else name
        engine = open_copy_engine(kind, place)  # type: ignore[arg-type]
        try:
            yield Bench(name, engine, cache, buffer, tensor)
        finally:
            engine.close()


def plan(args: Any) -> tuple[list[tuple[str, str, int | None]], dict[str, str]]:
    """What to run as ``(name, nic, gpu)``, and why the rest is not."""
    run: list[tuple[str, str, int | None]] = [("host", "", None)]
    missing: dict[str, str] = {}
    try:
        LibCuda()
        no_gpu = "" if torch is not None and torch.cuda.is_available() else "torch sees no GPU"
    except CudaMissing as error:
        no_gpu = str(error)
    if no_gpu:
        missing["cuda"] = no_gpu
    else:
        run.append(("cuda", "", args.gpu))
    if no_gpu:
        missing["cnic"] = no_gpu
    elif not args.nic:
        missing["cnic"] = "no RDMA NIC named (--nic mlx5_0:1)"
    elif not rdma_port(args.nic).is_dir():
        missing["cnic"] = f"{args.nic} is not in /sys/class/infiniband"
    else:
        run.append(("cnic", args.nic, args.gpu))
    if "cnic" in missing:
        run.append(("cnic-tcp", "", None))
    return run, missing


def rdma_port(nic: str) -> Path:
    """Where the kernel shows a port, by UCX's name of it."""
    device, _, port = nic.partition(":")
    return Path("/sys/class/infiniband") / device / "ports" / (port or "1")


def nic_counters(nic: str) -> dict[str, int]:
    """All counters of a port that are numbers."""
    found = {}
    for folder in ("counters", "hw_counters"):
        for file in sorted((rdma_port(nic) / folder).glob("*")):
            with contextlib.suppress(OSError, ValueError):  # some cannot be read, by design
                found[f"{folder}/{file.name}"] = int(file.read_text())
    return found


# ---- checks -----------------------------------------------------------------------------------


def check_both_ways(bench: Bench) -> str:
    """See the module's text."""
    rng = np.random.default_rng(1)
    for size, count, scattered in ((4096, 3000, True), (100_000, 300, True), (65_536, 500, False)):
        bench.host[:] = rng.integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        bench.clear_device()
        slots = MEMORY_BYTES // size
        source = rng.permutation(slots)[:count] if scattered else np.arange(count)
        target = rng.permutation(slots)[:count] if scattered else np.arange(count)
        bench.engine.copy(
            ranges(bench.buffer.address + source * size, bench.cache.address + target * size, size)
        )
        expected = bench.host[: slots * size].reshape(slots, size)[source].copy()
        got = bench.device()[: slots * size].reshape(slots, size)
        if not (got[target] == expected).all():
            return f"{count} blocks of {size} bytes did not arrive in the cache"
        others = np.ones(slots, dtype=bool)
        others[target] = False
        if got[others].any():
            return "bytes were written where nothing was asked for"
        bench.host[:] = 0
        bench.engine.copy(
            ranges(bench.cache.address + target * size, bench.buffer.address + source * size, size)
        )
        if not (bench.host[: slots * size].reshape(slots, size)[source] == expected).all():
            return f"{count} blocks of {size} bytes did not come back"
    return "ok"


def check_order(bench: Bench, *, host_waits: bool) -> str:
    """See the module's text."""
    if bench.tensor is None:
        return "not run: the cache is host memory, nothing is launched ahead"
    gpu = torch.device(bench.tensor.device)
    work = torch.randn(4096, 4096, device=gpu)
    compute = torch.cuda.Stream(gpu)
    rng = np.random.default_rng(2)
    stored = rng.integers(0, 256, (16, REGION_BYTES), dtype=np.uint8)
    half = MEMORY_BYTES // 2
    bench.host[:half] = stored.ravel()[:half]
    out = bench.buffer.address + half
    block = 64 << 10
    blocks = np.arange(REGION_BYTES // block) * block
    exports: list[Copy] = []
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        slot = layer % 16
        region = bench.cache.address + (layer % 2) * REGION_BYTES
        view = bench.tensor[(layer % 2) * REGION_BYTES :][:REGION_BYTES]
        if layer >= 16:  # its place on the host is read back before it is written again
            exports[layer - 16].wait(30.0)
            first = bench.host[half + slot * REGION_BYTES :][:REGION_BYTES]
            if not (first == stored[slot] + np.uint8(1)).all():
                return f"layer {layer - 16} was exported before it was computed, or loaded late"
        load = bench.engine.submit(
            ranges(bench.buffer.address + slot * REGION_BYTES + blocks, region + blocks, block),
            exports[-2:-1] if layer else [],
        )
        if host_waits:
            load.wait(30.0)
        else:
            load.before(compute.cuda_stream)
        with torch.cuda.stream(compute):
            for _ in range(4):
                torch.mm(work, work)
            view.add_(1)
        fence = bench.engine.fence(compute.cuda_stream)
        exports.append(
            bench.engine.submit(
                ranges(region + blocks, out + slot * REGION_BYTES + blocks, block),
                [] if fence is None else [fence],
            )
        )
        for export in exports[-2:]:
            export.reached()
    for export in exports[-16:]:
        export.wait(30.0)
    for layer in range(LAYERS - 16, LAYERS):
        slot = layer % 16
        last = bench.host[half + slot * REGION_BYTES :][:REGION_BYTES]
        if not (last == stored[slot] + np.uint8(1)).all():
            return f"layer {layer} was exported before it was computed, or loaded late"
    return "ok"


def check_nic(bench: Bench, nic: str) -> str:
    """See the module's text."""
    if not nic:
        return "not run: no RDMA NIC"
    before = nic_counters(nic)
    size, count = 1 << 20, 128
    places = np.arange(count) * size
    rounds = 8
    for _ in range(rounds):
        bench.engine.copy(ranges(bench.buffer.address + places, bench.cache.address + places, size))
    grown = {
        name: value - before[name]
        for name, value in nic_counters(nic).items()
        if name in before and value > before[name]
    }
    say(f"counters of {nic} that grew while {rounds * size * count} bytes were copied: {grown}")
    # port_*_data count four bytes at a time.
    nbytes = max(
        [value * 4 for name, value in grown.items() if name.endswith("_data")]
        + [value for name, value in grown.items() if "bytes" in name]
        + [0]
    )
    if nbytes >= rounds * size * count:
        return "ok"
    return "cannot tell: no counter of this NIC shows what it sends to itself"


# ---- figures ----------------------------------------------------------------------------------


def rates(bench: Bench, rounds: int, most_mib: int) -> list[dict[str, Any]]:
    """Scattered blocks into the cache and out of it."""
    rows = []
    rng = np.random.default_rng(3)
    for size in SIZES:
        for count in COUNTS:
            slots = MEMORY_BYTES // size
            if count > slots or size * count > most_mib << 20:
                continue
            ours = bench.buffer.address + rng.permutation(slots)[:count] * size
            theirs = bench.cache.address + rng.permutation(slots)[:count] * size
            row: dict[str, Any] = {"engine": bench.name, "size_bytes": size, "count": count}
            ways = {"in": ranges(ours, theirs, size), "out": ranges(theirs, ours, size)}

            def measure(runs: Descriptors, count: int = count) -> dict[str, float]:
                cpu, start = time.process_time(), time.perf_counter()
                bench.engine.copy(runs)
                wall = time.perf_counter() - start
                return {
                    "us": wall / count * 1e6,
                    "cpu_us": (time.process_time() - cpu) / count * 1e6,
                    "gb_s": runs.nbytes / wall / 1e9,
                }

            sides: dict[str, Callable[[], dict[str, float]]] = {
                way: lambda runs=runs: measure(runs)  # type: ignore[misc]
                for way, runs in ways.items()
            }
            for side in sides.values():
                side()
            for way, samples in alternate(sides, rounds).items():
                for key in ("us", "cpu_us", "gb_s"):
                    row[f"{way}_{key}"] = round(median(samples, key), 3)
            rows.append(row)
    return rows


def main() -> int:
    """Run what this machine has."""
    parser = arguments(__doc__)
    parser.add_argument("--check", action="store_true", help="checks only, no figures")
    parser.add_argument("--nic", default="", help="RDMA device and port beside the GPU: mlx5_0:1")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--require", default="", help="engines that must run: cuda,cnic")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most-mib", type=int, default=128, help="largest submission measured")
    args = parser.parse_args()
    run, missing = plan(args)
    checks: dict[str, dict[str, str]] = {}
    rows: list[dict[str, Any]] = []
    for name, nic, gpu in run:
        try:
            with opened(name, nic, gpu) as bench:
                say(f"{name}: checking")
                checks[name] = {
                    "both_ways": check_both_ways(bench),
                    "order": check_order(bench, host_waits=False),
                    "host_order": check_order(bench, host_waits=True),
                    "nic_carried": check_nic(bench, nic),
                }
                if not args.check:
                    say(f"{name}: measuring")
                    rows += rates(bench, args.rounds, args.most_mib)
        except CopyEngineMissing as error:
            missing[name] = str(error)
    failed = [
        f"{name}.{check}: {said}"
        for name, results in checks.items()
        for check, said in results.items()
        if said != "ok" and not said.startswith(("not run", "cannot tell"))
    ]
    failed += [
        f"{name} was required and did not run: {missing[name]}"
        for name in filter(None, args.require.split(","))
        if name in missing
    ]
    for name, results in checks.items():
        for check, said in results.items():
            print(f"{name:9s} {check:12s} {said}")
    for name, why in missing.items():
        print(f"{name:9s} NOT RUN      {why}")
    if rows:
        table(
            rows,
            [
                "engine",
                "size_bytes",
                "count",
                "in_us",
                "in_gb_s",
                "out_us",
                "out_gb_s",
                "in_cpu_us",
            ],
        )
    for line in failed:
        print(f"FAILED: {line}")
    result = {
        "benchmark": "copy_engines",
        "machine": machine(),
        "checks": checks,
        "not_run": missing,
        "failed": failed,
        "rates": rows,
    }
    finish(result, args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
