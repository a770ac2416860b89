"""The store: whether it can be used, its room, and how fast blocks come and go."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dualpath.blocks import KEY_BYTES, BlockLayout
from dualpath.config import ClusterConfig, NodeConfig, Size, StorageConfig
from dualpath.doctor.finding import Finding, fail, ok, warn
from dualpath.storage import (
    BlockId,
    ReadStatus,
    Store,
    StoreError,
    WriteStatus,
    open_store,
    open_upkeep,
    scratch_in_bucket,
)
from dualpath.storage.filesystem import is_of_one_machine
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.memory import aligned_buffers

_SAMPLE_BYTES: Final = 64 << 20
_DEADLINE_S: Final = 60.0
_CLOCK_SLACK_S: Final = 2.0
_LOW_SPACE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Rate:
    """What was measured.

    Attributes:
        block_bytes, blocks: size and number of the files or objects.
        read_bytes_s, write_bytes_s: their bytes a second.
        io_name, direct: how; see ``Store``.
        clock_lead_s: how far the store's clock is ahead of ours.
    """

    block_bytes: int
    blocks: int
    read_bytes_s: float
    write_bytes_s: float
    io_name: str
    direct: bool
    clock_lead_s: float


def check_storage(
    config: ClusterConfig, layout: BlockLayout, nodes: Sequence[NodeConfig]
) -> Iterator[Finding]:
    """Free space, and the rate at which blocks are written and read here."""
    storage = config.storage
    where, advice = storage.path, "see storage.path, storage.s3 and the credentials"
    try:
        if storage.in_bucket:
            yield _judge_bucket(storage)
        else:
            path = Path(storage.path).absolute()
            existing = _existing(path)
            where, advice = str(existing), "see storage.path, .io and .direct"
            free = shutil.disk_usage(existing).free
            yield _judge_space(storage, path, free)
            if free < 4 * _SAMPLE_BYTES:
                yield warn("storage rate", "not measured: too little space", "make room first")
                return
        rate = measure(storage, layout)
    except (OSError, StoreError) as error:
        yield fail("storage", f"{where}: {error}", advice)
        return
    yield from _judge_rate(rate, nodes)


def _judge_rate(rate: Rate, nodes: Sequence[NodeConfig]) -> Iterator[Finding]:
    how = rate.io_name
    if how != "s3":
        how += ", O_DIRECT" if rate.direct else ", page cache"
    text = (
        f"read {rate.read_bytes_s / 1e6:,.0f} MB/s, write {rate.write_bytes_s / 1e6:,.0f} MB/s "
        f"({rate.blocks} blocks of {rate.block_bytes:,} bytes, {how})"
    )
    slow = [
        f"nodes.{node.name}.snic.{name}"
        for node in nodes
        for name, limit, found in (
            ("read", node.snic.read, rate.read_bytes_s),
            ("write", node.snic.write, rate.write_bytes_s),
        )
        if limit.limited and found < limit
    ]
    if slow:
        yield warn("storage rate", f"{text}: below {', '.join(slow)}", "the limit is never reached")
    elif not rate.direct:
        yield warn(
            "storage rate", f"{text}; read from memory, so the disk may be slower",
            "use a file system that takes O_DIRECT, or accept the page cache's use of CPU",
        )  # fmt: skip
    else:
        yield ok("storage rate", text)
    if abs(rate.clock_lead_s) > _CLOCK_SLACK_S:
        yield warn(
            "storage clock", f"the store's clock is {rate.clock_lead_s:+.1f} s off ours",
            "synchronise both: the order of eviction is by the time of use",
        )  # fmt: skip


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _used_bytes(storage: StorageConfig) -> int:
    with closing(open_upkeep(storage)) as upkeep:
        return sum(root.stored_bytes for root in upkeep.stats().values())


def _judge_bucket(storage: StorageConfig) -> Finding:
    text = f"{_used_bytes(storage):,} bytes stored in {storage.path}"
    if not storage.capacity:
        return warn("storage space", f"{text}; no limit: it grows for ever", "set storage.capacity")
    return ok("storage space", f"{text}; storage.capacity is {storage.capacity:,}")


def _judge_space(storage: StorageConfig, path: Path, free: int) -> Finding:
    used = _used_bytes(storage)
    capacity = storage.capacity
    text = f"{used:,} bytes stored, {free:,} free in {path}"
    if not capacity:
        then = "old blocks go" if is_of_one_machine(path) else "nothing new is stored"
        return warn(
            "storage space", f"{text}; no limit: the disk fills up, then {then}",
            "set storage.capacity",
        )  # fmt: skip
    if capacity - used > free:
        return warn(
            "storage space", f"{text}; storage.capacity is {capacity:,}",
            f"make room, or set storage.capacity to less than {used + free:,}",
        )  # fmt: skip
    if free < _LOW_SPACE_BYTES:
        return warn("storage space", text, "leave the file system some room")
    return ok("storage space", f"{text}; storage.capacity is {capacity:,}")


def measure(storage: StorageConfig, layout: BlockLayout) -> Rate:
    """Write and read some blocks in a store of their own, on the same file system or in the same
    bucket, which is removed again.

    Raises:
        OSError, StoreError: it cannot be done there.
    """
    file_bytes = HEADER_BYTES + layout.slot_bytes
    count = max(1, min(256, _SAMPLE_BYTES // file_bytes))
    root = os.urandom(KEY_BYTES)
    blocks = [BlockId(os.urandom(KEY_BYTES), root) for _ in range(count)]
    slots = aligned_buffers(count, layout.slot_bytes)
    for slot in slots:
        slot[:] = os.urandom(4096) * (layout.slot_bytes // 4096)
    unlimited = msgspec.structs.replace(storage, capacity=Size(0))
    with _scratch(unlimited) as own, open_store(own, layout) as store:
        wall_s = time.time()
        written_s = _timed(store, WriteStatus.PUBLISHED, root, blocks, slots)
        with closing(open_upkeep(own)) as upkeep:
            newest = upkeep.stats()[root].newest_use_s
        read_s = _timed(store, ReadStatus.OK, root, blocks, slots)
        lead = newest - wall_s if newest < wall_s else max(0.0, newest - time.time())
        total = count * file_bytes
        return Rate(
            file_bytes, count, total / read_s, total / written_s, store.io_name, store.direct, lead
        )


@contextmanager
def _scratch(storage: StorageConfig) -> Iterator[StorageConfig]:
    if storage.in_bucket:
        with scratch_in_bucket(storage, "doctor") as own:
            yield own
        return
    folder = _existing(Path(storage.path).absolute())
    scratch = tempfile.mkdtemp(prefix=".dualpath-doctor-", dir=folder)
    try:
        yield msgspec.structs.replace(storage, path=scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _timed(
    store: Store,
    good: WriteStatus | ReadStatus,
    root: bytes,
    blocks: Sequence[BlockId],
    slots: Sequence[memoryview],
) -> float:
    call = store.write if isinstance(good, WriteStatus) else store.read
    start_s = time.monotonic()
    statuses = call(root, blocks, slots, start_s + _DEADLINE_S)
    taken_s = time.monotonic() - start_s
    bad = [status for status in statuses if status is not good]
    if bad:
        raise StoreError(f"{len(bad)} of {len(blocks)} blocks: {bad[0].value}")
    return taken_s
