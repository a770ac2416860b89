"""The model, the blocks it makes, and whether buffers, HBM and storage are made for them."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualpath.blocks import KEY_BYTES, BlockLayout
from dualpath.config import ClusterConfig, NodeConfig, Role
from dualpath.doctor.finding import Finding, fail, ok, warn
from dualpath.doctor.machine import weight_bytes
from dualpath.model import ModelFacts, UnsupportedModel
from dualpath.storage import BlockId, BlockStore, ReadStatus, StoreError, WriteStatus
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.maintenance import stats
from dualpath.storage.memory import aligned_buffers

_SAMPLE_BYTES: Final = 64 << 20
_DEADLINE_S: Final = 60.0
_CLOCK_SLACK_S: Final = 2.0
_LOW_SPACE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Rate:
    """What was measured.

    Attributes:
        block_bytes, blocks: size and number of the files.
        read_bytes_s, write_bytes_s: file bytes a second.
        io_name, direct: how; see ``BlockStore``.
        clock_lead_s: how far the store's clock is ahead of ours.
    """

    block_bytes: int
    blocks: int
    read_bytes_s: float
    write_bytes_s: float
    io_name: str
    direct: bool
    clock_lead_s: float


def check_model(config: ClusterConfig) -> tuple[Finding, BlockLayout | None]:
    """Whether the model can be served, and the layout of its blocks."""
    path = Path(config.model.path)
    if not path.is_dir():
        return warn(
            "model", f"{path} is not a folder here: its blocks cannot be sized",
            "put the model there, or let vLLM download it",
        ), None  # fmt: skip
    try:
        facts = ModelFacts.from_config_json(path, kv_dtype=config.model.dtype)
    except UnsupportedModel as error:
        return fail("model", str(error), "choose a supported model"), None
    layout = BlockLayout(
        num_layers=facts.num_layers,
        block_tokens=config.engine.block_tokens,
        engine_block_tokens=config.engine.engine_block_tokens,
        token_layer_bytes=facts.token_layer_bytes,
    )
    return ok(
        "model", f"{facts.architecture}, {facts.token_bytes:,} bytes of KV a token, "
        f"{layout.full_block_bytes:,} a block",
    ), layout  # fmt: skip


def check_buffers(
    config: ClusterConfig, layout: BlockLayout, nodes: Sequence[NodeConfig]
) -> Iterator[Finding]:
    """Whether the longest prompt fits: it needs the whole of itself in the DE's buffer."""
    need = layout.blocks_for_tokens(config.model.max_model_len) * layout.slot_bytes
    for role, field, size in (
        (Role.PREFILL, "buffers.prefill", config.buffers.prefill),
        (Role.DECODE, "buffers.decode", config.buffers.decode),
    ):
        if not any(node.role is role for node in nodes):
            continue
        tokens = size // layout.slot_bytes * layout.block_tokens
        if size < need:
            yield fail(
                field, f"{size:,} bytes hold {tokens:,} tokens; longer prompts are refused",
                f"at least {need:,} bytes for model.max_model_len = {config.model.max_model_len}",
            )  # fmt: skip
        else:
            yield ok(field, f"{size:,} bytes hold {tokens:,} tokens")


def check_hbm(config: ClusterConfig) -> Iterator[Finding]:
    """Room on every GPU for weights and KV cache, asked of nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield warn("hbm", "there is a GPU but no nvidia-smi to ask", "install the GPU's driver")
        return
    query = [program, "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield warn("hbm", f"nvidia-smi does not answer: {error}", "look after the GPU's driver")
        return
    yield from judge_hbm(config, done.stdout, weight_bytes(Path(config.model.path)))


def judge_hbm(config: ClusterConfig, answer: str, weights: int) -> Iterator[Finding]:
    """Judge nvidia-smi's lines ``index, total MiB, free MiB``."""
    need = weights + config.engine.kv_cache
    for index, total_mib, free_mib in csv.reader(answer.splitlines(), skipinitialspace=True):
        total, free = int(total_mib) << 20, int(free_mib) << 20
        text = (
            f"GPU {index}: weights {weights:,} + engine.kv_cache {config.engine.kv_cache:,} bytes; "
            f"{free:,} of {total:,} free"
        )
        if need > total:
            yield fail("hbm", text, "make engine.kv_cache smaller")
        elif need > free:
            yield warn("hbm", text, "free the GPU, unless an engine of this cluster is on it")
        else:
            yield ok("hbm", text)


def check_storage(
    config: ClusterConfig, layout: BlockLayout, nodes: Sequence[NodeConfig]
) -> Iterator[Finding]:
    """Free space, and the rate at which blocks are written and read here."""
    path = Path(config.storage.path).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    yield _judge_space(config, path, free)
    if free < 4 * _SAMPLE_BYTES:
        yield warn("storage rate", "not measured: too little space", "make room first")
        return
    try:
        rate = measure(config, layout, existing)
    except (OSError, StoreError) as error:
        yield fail("storage", f"{existing}: {error}", "see storage.path, .io and .direct")
        return
    how = f"{rate.io_name}, {'O_DIRECT' if rate.direct else 'page cache'}"
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


def _judge_space(config: ClusterConfig, path: Path, free: int) -> Finding:
    used = sum(root.stored_bytes for root in stats(path).values())
    capacity = config.storage.capacity
    text = f"{used:,} bytes stored, {free:,} free in {path}"
    if not capacity:
        return warn(
            "storage space", f"{text}; no limit: the disk fills up, then nothing new is stored",
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


def measure(config: ClusterConfig, layout: BlockLayout, folder: Path) -> Rate:
    """Write and read some blocks in a store of their own, which is removed again.

    Args:
        folder: an existing directory on the store's file system.

    Raises:
        OSError, StoreError: it cannot be done there.
    """
    scratch = folder / f".dualpath-doctor-{os.getpid()}"
    file_bytes = HEADER_BYTES + layout.slot_bytes
    count = max(1, min(256, _SAMPLE_BYTES // file_bytes))
    root = os.urandom(KEY_BYTES)
    blocks = [BlockId(os.urandom(KEY_BYTES), root) for _ in range(count)]
    slots = aligned_buffers(count, layout.slot_bytes)
    for slot in slots:
        slot[:] = os.urandom(4096) * (layout.slot_bytes // 4096)
    try:
        with BlockStore.open(
            scratch, layout, io=config.storage.io, direct=config.storage.direct,
            fsync=config.storage.fsync, batch_blocks=config.storage.batch_blocks,
        ) as store:  # fmt: skip
            wall_s = time.time()
            written_s = _timed(store, WriteStatus.PUBLISHED, root, blocks, slots)
            newest = next(scratch.glob("blocks/*/*/*")).stat().st_mtime
            read_s = _timed(store, ReadStatus.OK, root, blocks, slots)
            lead = newest - wall_s if newest < wall_s else max(0.0, newest - time.time())
            io_name, direct = store.io_name, store.direct
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    total = count * file_bytes
    return Rate(file_bytes, count, total / read_s, total / written_s, io_name, direct, lead)


def _timed(
    store: BlockStore,
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
