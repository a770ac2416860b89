"""The store on real files, with each I/O method, through the page cache and around it."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_kit import LAYOUT, ROOT, chain, content, empty, filled, leftovers, path_of, soon

from dualpath.blocks import BlockLayout
from dualpath.storage import (
    BlockId,
    BlockStore,
    Limiter,
    ReadStatus,
    StoreClosedError,
    StoreError,
    UnsupportedIoError,
    WriteStatus,
)
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.nixl_module import find_nixl

pytestmark = pytest.mark.integration

FILE_BYTES = HEADER_BYTES + LAYOUT.slot_bytes
needs_nixl = pytest.mark.skipif(find_nixl() is None, reason="NIXL is not installed")
METHODS = [
    pytest.param(("threads", "off"), id="threads-cached"),
    pytest.param(("threads", "on"), id="threads-direct"),
    pytest.param(("nixl", "off"), id="nixl-cached", marks=needs_nixl),
    pytest.param(("nixl", "on"), id="nixl-direct", marks=needs_nixl),
]


def open_store(path: Path, io: str = "threads", direct: str = "off", **more: object) -> BlockStore:
    options: dict[str, object] = {"fsync": False, "batch_blocks": 4, **more}
    try:
        return BlockStore.open(path, LAYOUT, io=io, direct=direct, **options)  # type: ignore[arg-type]
    except UnsupportedIoError as error:
        if "O_DIRECT" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> tuple[str, str]:
    io, direct = request.param
    return io, direct


@pytest.fixture
def store(tmp_path: Path, method: tuple[str, str]) -> Iterator[BlockStore]:
    with open_store(tmp_path, *method) as opened:
        assert opened.io_name == method[0]
        yield opened
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[BlockStore]:
    with open_store(tmp_path) as opened:
        yield opened


def test_what_is_read_is_what_was_written(store: BlockStore) -> None:
    blocks = chain(11)  # more than two batches
    written, read = filled(blocks), empty(11)
    assert store.write(ROOT, blocks, written, soon()) == [WriteStatus.PUBLISHED] * 11
    assert store.read(ROOT, blocks, read, soon()) == [ReadStatus.OK] * 11
    for before, after in zip(written, read, strict=True):
        assert hashlib.sha256(before).digest() == hashlib.sha256(after).digest()
    counters = store.counters()
    assert counters["storage_write_bytes"] == counters["storage_read_bytes"] == 11 * FILE_BYTES
    assert counters["storage_read_blocks_ok"] == 11
    assert leftovers(store.path) == []


def test_publishing_again_moves_no_bytes(store: BlockStore) -> None:
    blocks = chain(3)
    store.write(ROOT, blocks[:2], filled(blocks[:2]), soon())
    inodes = [path_of(store.path, block).stat().st_ino for block in blocks[:2]]
    statuses = store.write(ROOT, blocks, filled(blocks), soon())
    assert statuses == [WriteStatus.PRESENT, WriteStatus.PRESENT, WriteStatus.PUBLISHED]
    assert store.counters()["storage_write_bytes"] == 3 * FILE_BYTES
    assert [path_of(store.path, block).stat().st_ino for block in blocks[:2]] == inodes


def test_one_bad_block_among_good_ones(store: BlockStore) -> None:
    blocks = chain(6)
    store.write(ROOT, blocks, filled(blocks), soon())
    path_of(store.path, blocks[1]).unlink()
    damaged = path_of(store.path, blocks[3])
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    slots = empty(6)
    statuses = store.read(ROOT, blocks, slots, soon())
    ok = ReadStatus.OK
    assert statuses == [ok, ReadStatus.MISSING, ok, ReadStatus.CORRUPT, ok, ok]
    for index in (0, 2, 4, 5):
        assert bytes(slots[index]) == content(blocks[index], LAYOUT.slot_bytes)
    assert not damaged.exists()
    counters = store.counters()
    assert counters["storage_corrupt_removed"] == 1
    assert counters["storage_read_blocks_missing"] == 1
    # Gone means gone: no second look finds it, and it can be stored again.
    assert store.read(ROOT, [blocks[3]], empty(1), soon()) == [ReadStatus.MISSING]
    assert store.write(ROOT, [blocks[3]], filled([blocks[3]]), soon()) == [WriteStatus.PUBLISHED]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, FILE_BYTES - 1), change=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_found(plain: BlockStore, offset: int, change: int) -> None:
    blocks = chain(1)
    assert plain.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PUBLISHED]
    path = path_of(plain.path, blocks[0])
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ change]))
    assert plain.read(ROOT, blocks, empty(1), soon()) == [ReadStatus.CORRUPT]
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_corrupt(store: BlockStore, size: int) -> None:
    blocks = chain(1)
    store.write(ROOT, blocks, filled(blocks), soon())
    path = path_of(store.path, blocks[0])
    with path.open("r+b") as file:
        file.truncate(size)
    assert store.read(ROOT, blocks, empty(1), soon()) == [ReadStatus.CORRUPT]
    assert not path.exists()


def test_a_file_of_another_length_does_not_keep_the_good_one_out(plain: BlockStore) -> None:
    blocks = chain(1)
    path = path_of(plain.path, blocks[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"torn")
    assert plain.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PUBLISHED]
    assert plain.read(ROOT, blocks, empty(1), soon()) == [ReadStatus.OK]


@pytest.mark.parametrize("part", ["key", "parent", "root"])
def test_a_renamed_file_is_corrupt(plain: BlockStore, part: str) -> None:
    block, other = chain(1)[0], chain(1, salt="other")[0]
    plain.write(ROOT, [block], filled([block]), soon())
    root = bytes(32) if part == "root" else ROOT
    name = {
        "key": BlockId(other.key, block.parent),
        "parent": BlockId(block.key, other.key),
        "root": block,
    }[part]
    target = path_of(plain.path, name, root)
    target.parent.mkdir(parents=True, exist_ok=True)
    path_of(plain.path, block).rename(target)
    assert plain.read(root, [name], empty(1), soon()) == [ReadStatus.CORRUPT]
    assert not target.exists()


def test_blocks_of_another_geometry_are_corrupt(tmp_path: Path, plain: BlockStore) -> None:
    blocks = chain(1)
    plain.write(ROOT, blocks, filled(blocks), soon())
    other = BlockLayout(2, 16, 16, 249)  # same slot, other payload
    assert other.slot_bytes == LAYOUT.slot_bytes
    with BlockStore.open(tmp_path, other, io="threads", fsync=False) as store:
        assert store.read(ROOT, blocks, empty(1, other), soon()) == [ReadStatus.CORRUPT]


def test_a_good_block_put_in_the_place_of_a_bad_one_stays(plain: BlockStore) -> None:
    blocks = chain(1)
    plain.write(ROOT, blocks, filled(blocks), soon())
    path = path_of(plain.path, blocks[0])
    good = path.read_bytes()
    path.write_bytes(bytes(FILE_BYTES))
    with path.open("rb") as bad:  # a reader has the bad file open ...
        path.unlink()
        path.write_bytes(good)  # ... when somebody publishes a good one
        plain._reader._discard(ROOT, blocks[0], path, bad.fileno(), "test")
    assert plain.read(ROOT, blocks, empty(1), soon()) == [ReadStatus.OK]


def test_a_restart_finds_everything(tmp_path: Path, method: tuple[str, str]) -> None:
    blocks = chain(9)
    with open_store(tmp_path, *method, fsync=True) as first:
        assert first.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PUBLISHED] * 9
    with open_store(tmp_path, *method) as second:
        assert {block for _root, block in second.scan(ROOT)} == set(blocks)
        assert list(second.scan(bytes(32))) == []
        slots = empty(9)
        assert second.read(ROOT, blocks, slots, soon()) == [ReadStatus.OK] * 9
        assert [bytes(slot) for slot in slots] == [content(b, LAYOUT.slot_bytes) for b in blocks]


def test_remove(plain: BlockStore) -> None:
    blocks = chain(2)
    plain.write(ROOT, blocks, filled(blocks), soon())
    assert plain.remove(ROOT, blocks[1])
    assert not plain.remove(ROOT, blocks[1])
    assert [block for _root, block in plain.scan()] == blocks[:1]


def test_after_the_deadline_nothing_is_started(store: BlockStore) -> None:
    blocks = chain(5)
    past = time.monotonic() - 1
    assert store.write(ROOT, blocks, filled(blocks), past) == [WriteStatus.EXPIRED] * 5
    assert list(store.scan()) == []
    store.write(ROOT, blocks, filled(blocks), soon())
    slots = empty(5)
    assert store.read(ROOT, blocks, slots, past) == [ReadStatus.EXPIRED] * 5
    assert all(not any(slot) for slot in slots)
    assert store.counters()["storage_read_bytes"] == 0


def test_a_limited_read_is_paced_block_by_block(tmp_path: Path) -> None:
    rate = 50 * FILE_BYTES  # a block in 20 ms: one at a time, so that others get between
    reads = Limiter.shared(tmp_path / "nic", "n0-read", rate)
    with open_store(tmp_path, read_limiter=reads) as store:
        blocks = chain(6)
        store.write(ROOT, blocks, filled(blocks), soon())
        assert store.read(ROOT, blocks, empty(6), soon()) == [ReadStatus.OK] * 6
        assert (reads.state().grants, reads.state().granted_bytes) == (6, 6 * FILE_BYTES)
        # Missing blocks cost no bandwidth.
        assert set(store.read(ROOT, chain(4, "none"), empty(4), soon())) == {ReadStatus.MISSING}
        assert reads.state().grants == 6
    reads.close()


def test_a_read_that_the_nic_cannot_pass_in_time_expires_unread(tmp_path: Path) -> None:
    reads = Limiter.shared(tmp_path / "nic", "n0-read", FILE_BYTES / 3600)
    with open_store(tmp_path, read_limiter=reads) as store:
        blocks = chain(3)
        store.write(ROOT, blocks, filled(blocks), soon())
        slots = empty(3)
        assert store.read(ROOT, blocks, slots, soon()) == [ReadStatus.EXPIRED] * 3
        assert all(not any(slot) for slot in slots)
        assert reads.state().granted_bytes == 0
    reads.close()


def test_writes_pass_their_own_limiter(tmp_path: Path) -> None:
    writes = Limiter.shared(tmp_path / "nic", "n0-write", 100 * FILE_BYTES)
    with open_store(tmp_path, write_limiter=writes) as store:
        blocks = chain(4)
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PUBLISHED] * 4
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PRESENT] * 4
        assert writes.state().granted_bytes == 4 * FILE_BYTES
    writes.close()


def test_calls_that_are_wrong_raise(plain: BlockStore) -> None:
    blocks = chain(1)
    with pytest.raises(ValueError, match="slots"):
        plain.read(ROOT, blocks, [], soon())
    with pytest.raises(ValueError, match="slot is"):
        plain.read(ROOT, blocks, [memoryview(bytearray(5))], soon())
    with pytest.raises(ValueError, match="boundary"):
        plain.read(ROOT, blocks, [aligned_wrongly()], soon())
    with pytest.raises(ValueError, match="32 bytes"):
        plain.read(b"short", blocks, empty(1), soon())
    plain.close()
    with pytest.raises(StoreClosedError):
        plain.read(ROOT, blocks, empty(1), soon())


def aligned_wrongly() -> memoryview:
    big = BlockLayout(4, 16, 16, 250)
    return empty(1, big)[0][512 : 512 + LAYOUT.slot_bytes]


def test_no_blocks_is_no_work(store: BlockStore) -> None:
    assert store.read(ROOT, [], [], soon()) == []
    assert store.write(ROOT, [], [], soon()) == []


def test_what_cannot_be_done_is_refused_at_open(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="capacity: 100 bytes hold no block"):
        open_store(tmp_path, capacity_bytes=100)
    with pytest.raises(StoreError, match="io must be"):
        open_store(tmp_path, io="fast")
    with pytest.raises(StoreError, match="direct must be"):
        open_store(tmp_path, direct="maybe")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be used"):
        open_store(tmp_path / "file")
    assert list((tmp_path / "tmp").glob("*")) == []


def test_auto_without_nixl_takes_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath.storage.probe.find_nixl", lambda: None)
    with BlockStore.open(tmp_path, LAYOUT) as store:
        assert store.io_name == "threads"
    with pytest.raises(UnsupportedIoError, match="no NIXL"):
        BlockStore.open(tmp_path, LAYOUT, io="nixl")


def test_the_time_of_use_is_noted(plain: BlockStore) -> None:
    blocks = chain(1)
    plain.write(ROOT, blocks, filled(blocks), soon())
    path = path_of(plain.path, blocks[0])
    long_ago = time.time() - 10_000
    os.utime(path, (long_ago, long_ago))
    plain.read(ROOT, blocks, empty(1), soon())
    assert path.stat().st_mtime > long_ago + 5_000
