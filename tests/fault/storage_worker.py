"""A process that uses a store and is killed for it. Started by test_storage_crash.py.

Usage: storage_worker.py TASK STORE IO ARGUMENT
"""

import hashlib
import itertools
import resource
import sys
import time
from pathlib import Path

from dualpath.blocks import BlockLayout
from dualpath.storage import BlockId, BlockStore, Limiter
from dualpath.storage.limiter import MonotonicClock
from dualpath.storage.memory import aligned_buffers

LAYOUT = BlockLayout(num_layers=4, block_tokens=64, engine_block_tokens=64, token_layer_bytes=2048)
"""512 KiB a block."""
ROOT = hashlib.sha256(b"crash").digest()
BATCH = 8


def block(index: int, salt: str) -> BlockId:
    """A first block whose key follows from its number."""
    return BlockId(hashlib.sha256(f"{salt}/{index}".encode()).digest(), ROOT)


def content(name: BlockId) -> bytes:
    """Bytes that follow from the key."""
    return hashlib.shake_128(name.key).digest(4096) * (LAYOUT.slot_bytes // 4096)


def open_store(path: str, io: str) -> BlockStore:
    """The store as these tests use it."""
    return BlockStore.open(path, LAYOUT, io=io, direct="auto", fsync=True, batch_blocks=BATCH)


def publish(store: BlockStore, indexes: range, salt: str) -> list[str]:
    """Write some blocks; returns their statuses."""
    names = [block(index, salt) for index in indexes]
    slots = aligned_buffers(len(names), LAYOUT.slot_bytes)
    for name, slot in zip(names, slots, strict=True):
        slot[:] = content(name)
    return [s.value for s in store.write(ROOT, names, slots, time.monotonic() + 30)]


def main(task: str, path: str, io: str, argument: str) -> None:
    """Run one task."""
    if task == "limiter":
        limiter = Limiter.shared(path, "n0-read", 1e6)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(int(argument)):
            print(repr(limiter.reserve(1000, float("inf"))))
        return
    if task == "hold":
        limiter = Limiter.shared(path, "n0-read", 1e6)
        limiter.reserve(1000, float("inf"))
        assert limiter._file is not None
        limiter._file.lock(MonotonicClock(), float("inf"))
        print("held", flush=True)
        sys.stdin.readline()
        return
    with open_store(path, io) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        if task == "forever":
            for turn in itertools.count():
                publish(store, range(BATCH * turn, BATCH * (turn + 1)), argument)
                print(turn, flush=True)
        elif task == "once":
            print(*publish(store, range(int(argument)), "same"), flush=True)
        elif task == "limited":
            limit = int(argument)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            statuses = publish(store, range(4), "limited")
            leftovers = [
                p for p in Path(path, "tmp").glob("*/*") if p.is_file() and p.name != "hold"
            ]
            print(*statuses, len(leftovers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
