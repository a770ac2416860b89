"""One contract for every kind of store: directories by each I/O method, and buckets."""

import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from s3_server import S3Server
from storage_kit import LAYOUT, ROOT, chain, content, empty, filled, soon
from store_kinds import OBJECT_BYTES, Directory, InBucket, Kind

from dualpath.blocks import BlockLayout
from dualpath.config import StorageConfig
from dualpath.storage import (
    BlockId,
    Limiter,
    ReadStatus,
    Store,
    StoreClosedError,
    StoreError,
    WriteStatus,
    scan_stored,
)
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.nixl_module import find_nixl

pytestmark = pytest.mark.integration

PUBLISHED, PRESENT, FULL = WriteStatus.PUBLISHED, WriteStatus.PRESENT, WriteStatus.FULL
OK, MISSING, CORRUPT = ReadStatus.OK, ReadStatus.MISSING, ReadStatus.CORRUPT
needs_nixl = pytest.mark.skipif(find_nixl() is None, reason="NIXL is not installed")


@pytest.fixture(
    params=["threads", pytest.param("nixl", marks=needs_nixl), "usrbio", "s3"],
)
def kind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        yield InBucket(server, f"contract/{secrets.token_hex(8)}")
        return
    options: dict[str, object] = {"io": request.param}
    if request.param == "usrbio":
        monkeypatch.setenv("DUALPATH_SHIM_MOUNT", str(tmp_path))
        options["usrbio_library"] = str(request.getfixturevalue("usrbio_library"))
    path = str(tmp_path / "store")
    found = Directory(StorageConfig(path=path, fsync=False, batch_blocks=8, **options))  # type: ignore[arg-type]
    yield found
    assert found.leftovers() == []


@pytest.fixture
def store(kind: Kind) -> Iterator[Store]:
    with kind.open() as opened:
        yield opened


def put(store: Store, blocks: list[BlockId]) -> list[WriteStatus]:
    return store.write(ROOT, blocks, filled(blocks), soon())


def good(store: Store, blocks: list[BlockId]) -> list[ReadStatus]:
    """Statuses of a read, whose bytes are checked."""
    slots = empty(len(blocks))
    statuses = store.read(ROOT, blocks, slots, soon())
    for block, slot, status in zip(blocks, slots, statuses, strict=True):
        if status is OK:
            assert bytes(slot) == content(block, LAYOUT.slot_bytes)
    return statuses


def names(store: Store) -> set[BlockId]:
    return {block for _root, block in store.scan(ROOT)}


# ---- bytes ---------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(kind: Kind, store: Store) -> None:
    blocks = chain(11)  # more than a batch
    assert put(store, blocks) == [PUBLISHED] * 11
    assert good(store, blocks) == [OK] * 11
    counters = store.counters()
    assert counters["storage_write_bytes"] == counters["storage_read_bytes"] == 11 * OBJECT_BYTES
    assert (counters["storage_read_blocks_ok"], counters["storage_write_blocks_published"]) == (
        11,
        11,
    )
    assert kind.stored_bytes() == 11 * OBJECT_BYTES


def test_publishing_again_moves_no_bytes(store: Store) -> None:
    blocks = chain(3)
    put(store, blocks[:2])
    assert put(store, blocks) == [PRESENT, PRESENT, PUBLISHED]
    assert store.counters()["storage_write_bytes"] == 3 * OBJECT_BYTES


def test_a_restart_finds_everything(kind: Kind) -> None:
    blocks = chain(9)
    with kind.open() as first:
        assert put(first, blocks) == [PUBLISHED] * 9
    with kind.open() as second:
        assert names(second) == set(blocks)
        assert list(second.scan(bytes(32))) == []
        assert good(second, blocks) == [OK] * 9
        assert put(second, blocks) == [PRESENT] * 9
    assert {block for _root, block in scan_stored(kind.storage)} == set(blocks)


def test_no_blocks_is_no_work(store: Store) -> None:
    assert store.read(ROOT, [], [], soon()) == []
    assert store.write(ROOT, [], [], soon()) == []
    assert list(store.scan()) == []


# ---- faults of single blocks ---------------------------------------------------------------------


def test_bad_blocks_among_good_ones(kind: Kind, store: Store) -> None:
    blocks = chain(6)
    put(store, blocks)
    kind.delete_raw(blocks[1])
    raw = bytearray(kind.raw(blocks[3]))
    raw[-1] ^= 1
    kind.put_raw(blocks[3], bytes(raw))
    assert good(store, blocks) == [OK, MISSING, OK, CORRUPT, OK, OK]
    assert store.counters()["storage_corrupt_removed"] == 1
    # Gone means gone: no second look finds it, and it can be stored again.
    assert good(store, [blocks[3]]) == [MISSING]
    assert put(store, blocks) == [PRESENT, PUBLISHED, PRESENT, PUBLISHED, PRESENT, PRESENT]
    assert good(store, blocks) == [OK] * 6


def test_a_flipped_byte_anywhere_is_found(kind: Kind, store: Store) -> None:
    blocks = chain(12)
    put(store, blocks)
    # Magic, root, key, lengths, checksum, text, end of the header; payload and its padding.
    places = [0, 20, 60, 115, 130, 150, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5000]
    places += [HEADER_BYTES + LAYOUT.full_block_bytes, OBJECT_BYTES - 1, 2000]
    for block, place in zip(blocks, places, strict=True):
        raw = bytearray(kind.raw(block))
        raw[place] ^= 0x40
        kind.put_raw(block, bytes(raw))
    assert good(store, blocks) == [CORRUPT] * 12
    assert names(store) == set()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, OBJECT_BYTES - 1, OBJECT_BYTES + 1])
def test_another_length_is_corrupt(kind: Kind, store: Store, size: int) -> None:
    first, second = blocks = chain(2)
    put(store, blocks)
    for block in blocks:
        kind.put_raw(block, (kind.raw(block) + b"x")[:size])
    assert good(store, [first]) == [CORRUPT]
    assert good(store, [first]) == [MISSING]
    # Nor does it keep the good one out.
    assert put(store, [second]) == [PUBLISHED]
    assert good(store, [second]) == [OK]


@pytest.mark.parametrize("part", ["key", "parent", "root"])
def test_another_blocks_bytes_are_corrupt(kind: Kind, store: Store, part: str) -> None:
    (block,), (other,) = chain(1), chain(1, salt="other")
    put(store, [block])
    root = bytes(32) if part == "root" else ROOT
    name = {
        "key": BlockId(other.key, block.parent),
        "parent": BlockId(block.key, other.key),
        "root": block,
    }[part]
    kind.put_raw(name, kind.raw(block), root)
    assert store.read(root, [name], empty(1), soon()) == [CORRUPT]
    assert store.read(root, [name], empty(1), soon()) == [MISSING]


def test_another_geometry_is_corrupt(kind: Kind, store: Store) -> None:
    blocks = chain(1)
    put(store, blocks)
    other = BlockLayout(2, 16, 16, 249)  # same slot, other payload
    with kind.open(layout=other) as opened:
        assert opened.read(ROOT, blocks, empty(1, other), soon()) == [CORRUPT]


def test_remove(store: Store) -> None:
    blocks = chain(2)
    put(store, blocks)
    assert store.remove(ROOT, blocks[1])
    assert not store.remove(ROOT, blocks[1])
    assert names(store) == {blocks[0]}


def test_calls_that_are_wrong_raise(kind: Kind) -> None:
    blocks = chain(1)
    with kind.open() as store:
        with pytest.raises(ValueError, match="slots"):
            store.read(ROOT, blocks, [], soon())
        with pytest.raises(ValueError, match="slot is"):
            store.write(ROOT, blocks, [memoryview(bytearray(5))], soon())
        with pytest.raises(ValueError, match="32 bytes"):
            store.read(b"short", blocks, empty(1), soon())
    with pytest.raises(StoreClosedError):
        store.read(ROOT, blocks, empty(1), soon())
    store.close()  # twice is as good as once


def test_a_capacity_below_a_block_is_refused(kind: Kind) -> None:
    kind.storage = StorageConfig(
        path=kind.storage.path, s3=kind.storage.s3, capacity=OBJECT_BYTES - 1  # type: ignore[arg-type]
    )  # fmt: skip
    from dualpath.storage import open_store

    with pytest.raises(StoreError, match="hold no block"):
        open_store(kind.storage, LAYOUT)


# ---- several at once, deadlines, the NIC ---------------------------------------------------------


def test_of_several_writers_exactly_one_publishes(kind: Kind) -> None:
    blocks = chain(12)
    start = threading.Barrier(3)

    def write() -> list[WriteStatus]:
        with kind.open() as store:
            start.wait(20)
            return put(store, blocks)

    with ThreadPoolExecutor(3) as pool:
        outcomes = [future.result() for future in [pool.submit(write) for _ in range(3)]]
    for statuses in zip(*outcomes, strict=True):
        assert sorted(statuses, key=str) == [PRESENT, PRESENT, PUBLISHED]
    with kind.open() as store:
        assert good(store, blocks) == [OK] * 12


def test_readers_beside_writers_see_whole_blocks_or_none(kind: Kind) -> None:
    blocks = chain(16)
    with kind.open() as writer, kind.open() as reader, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [put(writer, [block]) for block in blocks])
        seen: set[ReadStatus] = set()
        while not writing.done():
            seen.update(good(reader, blocks))
        assert writing.result() == [[PUBLISHED]] * 16
        assert good(reader, blocks) == [OK] * 16
    assert seen <= {OK, MISSING}


def test_after_the_deadline_nothing_is_started(store: Store) -> None:
    blocks = chain(5)
    past = time.monotonic() - 1
    assert store.write(ROOT, blocks, filled(blocks), past) == [WriteStatus.EXPIRED] * 5
    assert names(store) == set()
    put(store, blocks)
    slots = empty(5)
    assert store.read(ROOT, blocks, slots, past) == [ReadStatus.EXPIRED] * 5
    assert all(not any(slot) for slot in slots)
    assert store.counters()["storage_read_bytes"] == 0


def test_bytes_pass_the_nics_limit(kind: Kind, tmp_path: Path) -> None:
    rate = 100 * OBJECT_BYTES
    with (
        closing(Limiter.shared(tmp_path / "nic", "read", rate)) as reads,
        closing(Limiter.shared(tmp_path / "nic", "write", rate)) as writes,
        kind.open(read_limiter=reads, write_limiter=writes) as store,
    ):
        blocks = chain(6)
        assert put(store, blocks) == [PUBLISHED] * 6
        assert put(store, blocks) == [PRESENT] * 6
        assert writes.state().granted_bytes == 6 * OBJECT_BYTES
        assert good(store, blocks) == [OK] * 6
        assert good(store, chain(4, "none")) == [MISSING] * 4
        assert reads.state().granted_bytes == 6 * OBJECT_BYTES


def test_what_the_nic_cannot_pass_in_time_is_not_moved(kind: Kind, tmp_path: Path) -> None:
    slow = OBJECT_BYTES / 3600
    blocks = chain(3)
    with kind.open() as store:
        put(store, blocks)
    with (
        closing(Limiter.shared(tmp_path / "nic", "read", slow)) as reads,
        closing(Limiter.shared(tmp_path / "nic", "write", slow)) as writes,
        kind.open(read_limiter=reads, write_limiter=writes) as store,
    ):
        slots = empty(3)
        assert store.read(ROOT, blocks, slots, soon()) == [ReadStatus.EXPIRED] * 3
        assert all(not any(slot) for slot in slots)
        assert put(store, chain(2, "more")) == [WriteStatus.EXPIRED] * 2
        assert names(store) == set(blocks)
        assert reads.state().granted_bytes == writes.state().granted_bytes == 0


# ---- capacity ------------------------------------------------------------------------------------


@pytest.fixture
def limited(kind: Kind) -> Iterator[Store]:
    """Room for eight blocks; account and place agree in the end."""
    with kind.open(blocks=8) as opened:
        yield opened
        check(kind)


def check(kind: Kind) -> None:
    with kind.upkeep() as upkeep:
        books = upkeep.books()
    assert books is not None
    assert (books.published_bytes, books.reserved_bytes) == (kind.stored_bytes(), 0)


def test_the_least_recently_used_chain_goes_leaf_by_leaf(kind: Kind, limited: Store) -> None:
    old, middle = chain(4, "old"), chain(4, "middle")
    assert put(limited, old + middle) == [PUBLISHED] * 8
    kind.make_older(limited, old, middle)
    new = chain(3, "new")
    assert put(limited, new) == [PUBLISHED] * 3
    assert limited.take_evicted() == {ROOT: [old[3].key, old[2].key, old[1].key]}
    assert limited.take_evicted() == {}
    assert names(limited) == {old[0], *middle, *new}
    counters = limited.counters()
    assert counters["storage_evicted_blocks"] == 3
    assert counters["storage_evicted_bytes"] == 3 * OBJECT_BYTES


def test_what_does_not_fit_is_full_from_the_end(kind: Kind, limited: Store) -> None:
    blocks = chain(11)
    assert put(limited, blocks) == [PUBLISHED] * 8 + [FULL] * 3
    # Its own beginning is never given up for its end.
    assert limited.counters()["storage_evicted_blocks"] == 0
    assert put(limited, blocks) == [PRESENT] * 8 + [FULL] * 3


def test_a_pinned_chain_stays(kind: Kind, limited: Store) -> None:
    hit = chain(6, "hit")
    put(limited, hit)
    limited.pin(ROOT, hit[-1].key, soon())
    limited.pin(ROOT, hit[-1].key, soon())
    other = chain(5, "other")
    assert put(limited, other) == [PUBLISHED] * 2 + [FULL] * 3
    limited.unpin(ROOT, hit[-1].key)
    with kind.open(blocks=8) as second:  # another process sees the pin too
        assert put(second, chain(3, "third")) == [PUBLISHED] * 2 + [FULL]
        assert set(hit) <= names(second)
    with kind.upkeep() as upkeep:
        assert set(hit) <= {block for _root, block in upkeep.scan()}
        upkeep.gc(0)
        assert {block for _root, block in upkeep.scan()} == set(hit)
    limited.unpin(ROOT, hit[-1].key)
    assert put(limited, chain(5, "last")) == [PUBLISHED] * 5
    assert names(limited) == {*hit[:3], *chain(5, "last")}


def test_the_parent_of_a_block_being_written_stays(limited: Store) -> None:
    long = chain(9, "long")
    put(limited, long[:8])
    # Room for long[8] could only come from long[7], on which it stands.
    assert put(limited, long[8:]) == [FULL]
    assert names(limited) == set(long[:8])


def test_a_pin_ends_with_its_store(kind: Kind) -> None:
    blocks = chain(8)
    with kind.open(blocks=8) as store:
        put(store, blocks)
        store.pin(ROOT, blocks[-1].key, soon())
    with kind.open(blocks=8) as store:
        assert put(store, chain(8, "other")) == [PUBLISHED] * 8
        check(kind)


def test_corrupt_and_removed_blocks_give_their_room_back(kind: Kind) -> None:
    blocks = chain(8)
    with kind.open(blocks=8) as store:
        put(store, blocks)
        raw = bytearray(kind.raw(blocks[7]))
        raw[9000] ^= 1
        kind.put_raw(blocks[7], bytes(raw))
        assert good(store, [blocks[7]]) == [CORRUPT]
        assert store.remove(ROOT, blocks[6])
        assert put(store, chain(2, "other")) == [PUBLISHED] * 2
        assert store.counters()["storage_evicted_blocks"] == 0
        assert kind.stored_bytes() == 8 * OBJECT_BYTES


def test_a_smaller_capacity_is_held_from_the_start(kind: Kind) -> None:
    blocks = chain(8)
    with kind.open(blocks=8) as store:
        put(store, blocks)
    with kind.open(blocks=5) as store:
        assert names(store) == set(blocks[:5])
        assert store.take_evicted() == {ROOT: [block.key for block in reversed(blocks[5:])]}
        check(kind)


def test_a_store_filled_without_a_limit_is_counted(kind: Kind) -> None:
    with kind.open() as store:
        put(store, chain(8))
    with kind.open(blocks=6) as store:
        assert len(names(store)) == 6
        check(kind)
    with kind.open() as store:  # from now on the account is kept, limit or not
        assert put(store, chain(10, "more")) == [PUBLISHED] * 10
        check(kind)


def test_writers_at_once_stay_within_the_capacity(kind: Kind) -> None:
    limit = 6 * OBJECT_BYTES + OBJECT_BYTES - 1
    start = threading.Barrier(3)
    over: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        # Of a directory the file system keeps count: fault/test_capacity_crash.py asks it.
        while kind.counts_at_once and not stop.is_set():
            if (now := kind.stored_bytes()) > limit:
                over.append(now)

    def write(number: int) -> int:
        with kind.open(blocks=6) as store:
            start.wait(20)
            statuses = [put(store, chain(3, f"{number}/{turn}")) for turn in range(4)]
        return sum(status is PUBLISHED for status in itertools.chain(*statuses))

    with ThreadPoolExecutor(4) as pool:
        watching = pool.submit(watch)
        published = sum(pool.map(write, range(3)))
        stop.set()
        watching.result()
    assert over == []
    assert published >= 6
    check(kind)


# ---- epochs and upkeep ---------------------------------------------------------------------------


def test_the_epoch_only_grows(kind: Kind) -> None:
    epochs = kind.epochs()
    assert epochs.read().weight_epoch == 0
    assert epochs.advance(in_place=True).weight_epoch == 1
    assert (kind.epochs().read().weight_epoch, kind.epochs().read().in_place) == (1, True)
    with ThreadPoolExecutor(4) as pool:
        steps = [pool.submit(kind.epochs().advance, in_place=False) for _ in range(8)]
        numbers = sorted(step.result().weight_epoch for step in steps)
    assert numbers == list(range(2, 10))
    assert kind.epochs().read().weight_epoch == 9


@pytest.mark.parametrize("damage", [b"", b"{", b'{"weight_epoch": -1}', b'{"other": 1}'])
def test_a_damaged_epoch_is_an_error_never_zero(kind: Kind, damage: bytes) -> None:
    kind.put_epoch(damage)
    with pytest.raises(StoreError, match="epoch"):
        kind.epochs().read()
    with pytest.raises(StoreError, match="epoch"):
        kind.epochs().advance(in_place=False)


def test_blocks_of_an_older_epoch_are_another_namespace(kind: Kind, store: Store) -> None:
    """An epoch is part of the root: nothing of the old one is found under the new."""
    old, new = (hashlib.sha256(epoch).digest() for epoch in (b"epoch 0", b"epoch 1"))
    blocks = chain(2, root=old)
    assert store.write(old, blocks, filled(blocks), soon()) == [PUBLISHED] * 2
    moved = [BlockId(blocks[0].key, new), blocks[1]]
    assert store.read(new, moved, empty(2), soon()) == [MISSING] * 2
    assert len(list(store.scan(old))) == 2 and list(store.scan(new)) == []


def test_stats_and_fsck(kind: Kind, store: Store) -> None:
    first, second = chain(4, "first"), chain(3, "second")
    put(store, first + second)
    kind.delete_raw(second[0])  # the others of its chain can be hit by nobody
    raw = bytearray(kind.raw(first[2]))
    raw[HEADER_BYTES + 7] ^= 1
    kind.put_raw(first[2], bytes(raw))
    kind.put_raw(second[2], b"torn")
    with kind.upkeep() as upkeep:
        found = upkeep.stats()[ROOT]
        assert (found.blocks, found.unreachable_blocks) == (6, 2)
        assert found.stored_bytes == 5 * OBJECT_BYTES + 4
        assert upkeep.books() is None
        report = upkeep.fsck()
        assert report.checked == 6 and report.removed == 0
        assert {block for _root, block, _reason in report.corrupt} == {first[2], second[2]}
        assert len(names(store)) == 6
        assert upkeep.fsck(repair=True).removed == 2
        assert names(store) == {first[0], first[1], first[3], second[1]}
        assert upkeep.fsck().corrupt == []


@pytest.mark.parametrize("account", [False, True])
def test_gc_leaves_no_gap(kind: Kind, account: bool) -> None:
    with kind.open(blocks=20 if account else 0) as store:
        first, second = chain(4, "first"), chain(4, "second")
        put(store, first + second)
        assert store.remove(ROOT, first[1])
        with kind.upkeep() as upkeep:
            assert upkeep.gc(0, min_age_s=1e9).removed == []
            report = upkeep.gc(4 * OBJECT_BYTES)
            # Those behind the gap first, and then leaf by leaf.
            assert [b for _root, b in report.removed][:2] == [first[3], first[2]]
            kept = names(store)
            assert len(kept) == 4
            for block in kept:
                assert block.parent == ROOT or block.parent in {other.key for other in kept}
