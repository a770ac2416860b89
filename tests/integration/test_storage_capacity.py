"""A limit on the bytes in a store: held to the byte, by evicting what may go and nothing else."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import capacity_worker as worker
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_kit import LAYOUT, ROOT, chain, empty, filled, path_of, soon

from dualpath.storage import (
    BlockId,
    BlockStore,
    ReadStatus,
    StoreError,
    WriteStatus,
    books,
    scan_blocks,
)
from dualpath.storage.books import LedgerFile, Totals
from dualpath.storage.capacity import Ledger
from dualpath.storage.forest import Forest
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.maintenance import fsck, gc

pytestmark = pytest.mark.integration

FILE_BYTES = HEADER_BYTES + LAYOUT.slot_bytes
PUBLISHED, PRESENT, FULL = WriteStatus.PUBLISHED, WriteStatus.PRESENT, WriteStatus.FULL


def open_store(path: Path, blocks: int, **more: object) -> BlockStore:
    """A store with room for ``blocks`` blocks, and not a byte more than is of any use."""
    options: dict[str, object] = {"io": "threads", "direct": "off", "fsync": False, **more}
    capacity = blocks * FILE_BYTES + FILE_BYTES - 1 if blocks else 0
    return BlockStore.open(path, LAYOUT, capacity_bytes=capacity, batch_blocks=4, **options)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with open_store(tmp_path, 8) as opened:
        yield opened
        check(opened)


def check(store: BlockStore) -> None:
    """Books and directory agree, nothing is reserved, nobody has pinned anything."""
    with closing(Ledger.visit(store.path)) as ledger:
        totals = ledger.usage(soon())
    files = Forest.scan(store.path)
    assert (totals.published_bytes, totals.reserved_bytes) == (files.total_bytes, 0)
    assert files.total_bytes <= store.capacity_bytes
    for folder in (store.path / "tmp").iterdir():
        if folder.is_dir():
            assert books.read_hold(folder) in (None, (0, []))
    room = store._room
    assert isinstance(room, Ledger)
    if room._account._forest is not None:
        room._account._forest.check_integrity()


def put(store: BlockStore, blocks: list[BlockId]) -> list[WriteStatus]:
    return store.write(ROOT, blocks, filled(blocks), soon())


def stored(store: BlockStore) -> set[BlockId]:
    return {block for _root, block in scan_blocks(store.path)}


def used(store: BlockStore, blocks: list[BlockId], when_s: float) -> None:
    for block in blocks:
        os.utime(path_of(store.path, block), (when_s, when_s))


def test_the_least_recently_used_chain_goes_leaf_by_leaf(store: BlockStore) -> None:
    old, middle = chain(4, "old"), chain(4, "middle")
    assert put(store, old + middle) == [PUBLISHED] * 8
    used(store, old, 1000.0)
    used(store, middle, 2000.0)
    new = chain(3, "new")
    assert put(store, new) == [PUBLISHED] * 3
    assert store.take_evicted() == {ROOT: [old[3].key, old[2].key, old[1].key]}
    assert store.take_evicted() == {}
    assert stored(store) == {old[0], *middle, *new}
    counters = store.counters()
    assert counters["storage_evicted_blocks"] == 3
    assert counters["storage_evicted_bytes"] == 3 * FILE_BYTES


def test_reading_makes_a_block_the_last_to_go(store: BlockStore) -> None:
    first, second = chain(4, "first"), chain(4, "second")
    put(store, first + second)
    used(store, first, 1000.0)
    used(store, second, 2000.0)
    put(store, chain(1, "a"))  # the index is made here, and first[3] goes
    assert store.read(ROOT, first[:3], empty(3), soon()) == [ReadStatus.OK] * 3
    put(store, chain(4, "b"))
    assert stored(store) == {*first[:3], *chain(1, "a"), *chain(4, "b")}


def test_what_does_not_fit_is_full_from_the_end(store: BlockStore) -> None:
    blocks = chain(11)
    assert put(store, blocks) == [PUBLISHED] * 8 + [FULL] * 3
    # Its own beginning is never given up for its end.
    assert store.counters()["storage_evicted_blocks"] == 0
    assert put(store, blocks) == [PRESENT] * 8 + [FULL] * 3


def test_a_chain_under_way_stays_while_it_is_pinned(store: BlockStore) -> None:
    hit = chain(6, "hit")
    put(store, hit)
    used(store, hit, 1000.0)
    store.pin(ROOT, hit[-1].key, soon())
    store.pin(ROOT, hit[-1].key, soon())
    other = chain(5, "other")
    assert put(store, other) == [PUBLISHED] * 2 + [FULL] * 3
    store.unpin(ROOT, hit[-1].key)
    assert put(store, other) == [PRESENT] * 2 + [FULL] * 3
    with closing(Ledger.visit(store.path)) as ledger:  # another process sees the pin too
        assert ledger.shrink(0, float("inf"), soon()).left_bytes == 6 * FILE_BYTES
    assert stored(store) == set(hit)
    store.unpin(ROOT, hit[-1].key)
    assert put(store, other) == [PUBLISHED] * 5
    assert stored(store) == {*hit[:3], *other}


def test_the_parent_of_a_block_being_written_stays(store: BlockStore) -> None:
    long = chain(9, "long")
    put(store, long[:8])
    used(store, long[:8], 1000.0)
    # Room for long[8] could only come from long[7], on which it stands.
    assert put(store, long[8:]) == [FULL]
    assert stored(store) == set(long[:8])


def test_a_pin_ends_with_its_process(tmp_path: Path) -> None:
    blocks = chain(8)
    with open_store(tmp_path, 8) as store:
        put(store, blocks)
        store.pin(ROOT, blocks[-1].key, soon())
    with open_store(tmp_path, 8) as store:
        assert put(store, chain(8, "other")) == [PUBLISHED] * 8


def test_corrupt_and_removed_blocks_give_their_room_back(store: BlockStore) -> None:
    blocks = chain(8)
    put(store, blocks)
    damaged = path_of(store.path, blocks[7])
    raw = bytearray(damaged.read_bytes())
    raw[9000] ^= 1
    damaged.write_bytes(raw)
    assert store.read(ROOT, [blocks[7]], empty(1), soon()) == [ReadStatus.CORRUPT]
    assert store.remove(ROOT, blocks[6])
    check(store)
    assert put(store, chain(2, "other")) == [PUBLISHED] * 2
    assert store.counters()["storage_evicted_blocks"] == 0
    # A torn file has not the size that was entered: everything is counted again.
    os.truncate(path_of(store.path, blocks[5]), 5000)
    assert store.read(ROOT, [blocks[5]], empty(1), soon()) == [ReadStatus.CORRUPT]
    check(store)
    os.truncate(path_of(store.path, blocks[4]), 5000)
    assert put(store, blocks[4:6]) == [PUBLISHED] * 2
    check(store)


def test_a_smaller_capacity_is_held_from_the_start(tmp_path: Path) -> None:
    blocks = chain(8)
    with open_store(tmp_path, 8) as store:
        put(store, blocks)
    with open_store(tmp_path, 5) as store:
        assert stored(store) == set(blocks[:5])
        assert store.take_evicted() == {ROOT: [block.key for block in reversed(blocks[5:])]}
        check(store)


def test_a_store_filled_without_a_limit_is_counted(tmp_path: Path) -> None:
    with open_store(tmp_path, 0) as store:
        put(store, chain(8))
        with closing(Ledger.visit(tmp_path)) as ledger:
            assert not ledger.usage(soon()).counted
    with open_store(tmp_path, 6) as store:
        assert len(stored(store)) == 6
        check(store)
    with open_store(tmp_path, 0) as store:
        assert put(store, chain(20, "more")) == [PUBLISHED] * 20
        with open_store(tmp_path, 10) as limited:
            assert len(stored(limited)) == 10
            check(limited)


@pytest.mark.parametrize("damage", ["gone", "garbage", "dirty", "power"])
def test_books_that_cannot_be_trusted_are_made_anew(tmp_path: Path, damage: str) -> None:
    with open_store(tmp_path, 8) as store:
        put(store, chain(8))
    ledger = tmp_path / "capacity" / "ledger"
    if damage == "gone":
        ledger.unlink()
    elif damage == "garbage":
        ledger.write_bytes(b"x" * 40)
    else:
        with closing(LedgerFile(tmp_path)) as file:
            wrong = Totals(7, 0, 5, 12345 * FILE_BYTES, dirty=damage == "dirty")
            file.save(wrong)
    with open_store(tmp_path, 8) as store:
        check(store)
        assert put(store, chain(3, "new")) == [PUBLISHED] * 3
        assert len(stored(store)) == 8


def test_a_log_that_is_begun_afresh_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "LOG_LIMIT_BYTES", 500)  # four entries
    with open_store(tmp_path, 8) as one, open_store(tmp_path, 8) as two:
        for turn in range(12):
            assert put((one, two)[turn % 2], chain(3, f"{turn}")) == [PUBLISHED] * 3
            assert len(stored(one)) <= 8
        check(one)
        check(two)


def test_two_processes_make_room_for_each_other(tmp_path: Path) -> None:
    with open_store(tmp_path, 8) as one, open_store(tmp_path, 8) as two:
        put(one, chain(4, "a"))
        used(one, chain(4, "a"), 1000.0)
        put(two, chain(4, "b"))
        used(two, chain(4, "b"), 2000.0)
        assert put(two, chain(2, "c")) == [PUBLISHED] * 2  # its index is made now ...
        used(two, chain(2, "c"), 500.0)
        assert put(one, chain(2, "d")) == [PUBLISHED] * 2
        used(one, chain(2, "d"), 3000.0)
        # ... and has to learn of what the other published and evicted since.
        assert put(two, chain(3, "e")) == [PUBLISHED] * 3
        assert stored(two) == {*chain(3, "b"), *chain(2, "d"), *chain(3, "e")}
        check(one)
        check(two)


def test_gc_and_fsck_keep_the_books(store: BlockStore) -> None:
    blocks = chain(8)
    put(store, blocks)
    path_of(store.path, blocks[0]).write_bytes(bytes(FILE_BYTES))
    assert fsck(store.path, repair=True).removed == 1
    check(store)
    report = gc(store.path, 3 * FILE_BYTES)
    assert (report.freed_bytes, report.kept_bytes) == (4 * FILE_BYTES, 3 * FILE_BYTES)
    check(store)
    assert put(store, chain(5, "other")) == [PUBLISHED] * 5
    assert store.counters()["storage_evicted_blocks"] == 0


def test_books_held_by_a_stopped_process_expire_the_write(store: BlockStore) -> None:
    with closing(LedgerFile(store.path)) as other:
        other.lock(soon())
        statuses = store.write(ROOT, chain(2), filled(chain(2)), time.monotonic() + 0.1)
        assert statuses == [WriteStatus.EXPIRED] * 2
        with pytest.raises(TimeoutError):
            store.pin(ROOT, chain(1)[0].key, time.monotonic() + 0.05)
        other.unlock()
    assert put(store, chain(2)) == [PUBLISHED] * 2


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match=r"storage\.capacity.*No locks"):
        open_store(tmp_path, 8)


def test_a_block_that_cannot_be_removed_is_counted(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, chain(4, "stuck") + chain(4, "free"))
    used(store, chain(4, "stuck"), 1000.0)
    stuck = {path_of(store.path, block) for block in chain(4, "stuck")}
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self in stuck:
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert put(store, chain(2, "new")) == [PUBLISHED] * 2
    assert store.counters()["storage_evict_failed"] == 1
    assert stored(store) == {*chain(4, "stuck"), *chain(2, "free"), *chain(2, "new")}


def expected_victims(
    names: list[BlockId], ages: dict[bytes, float], need: int, spared: set[bytes]
) -> list[bytes]:
    """By the rule, the slow way: the oldest block without children, again and again."""
    left = {name.key: name for name in names}
    gone: list[bytes] = []
    while len(gone) < need:
        parents = {name.parent for name in left.values()}

        def rank(key: bytes) -> tuple[bool, float, bytes]:
            at = key
            while at in left:
                at = left[at].parent
            return at == ROOT, ages[key], key

        may = [key for key in left if key not in parents and key not in spared]
        if not may:
            break
        gone.append(min(may, key=rank))
        del left[gone[-1]]
    return gone


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_order_of_eviction(tmp_path: Path, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 10), label="blocks")
    parents = data.draw(st.lists(st.integers(-1, 9), min_size=count, max_size=count))
    ages = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count), label="ages")
    keys = chain(count, "tree")
    names = [
        BlockId(key.key, ROOT if parent < 0 or not i else keys[parent % i].key)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
    pinned = data.draw(st.sets(st.sampled_from(keys), max_size=2), label="pinned")
    missing = data.draw(st.sets(st.sampled_from(keys), max_size=1), label="missing")
    new = chain(data.draw(st.integers(1, 4), label="new"), "new")
    with open_store(tmp_path, count) as store:
        assert put(store, names) == [PUBLISHED] * count
        for name in names:
            if BlockId(name.key, name.parent).key in {key.key for key in missing}:
                store.remove(ROOT, name)
        there = [name for name in names if name in stored(store)]
        times = {name.key: 1000.0 + age for name, age in zip(names, ages, strict=True)}
        for name in there:
            used(store, [name], times[name.key])
        for key in pinned:
            store.pin(ROOT, key.key, soon())
        need = max(0, len(there) + len(new) - count)
        victims = expected_victims(there, times, need, {key.key for key in pinned})
        fitting = min(len(new), count - len(there) + len(victims))
        assert put(store, new) == [PUBLISHED] * fitting + [FULL] * (len(new) - fitting)
        assert store.take_evicted().get(ROOT, []) == victims
        for key in pinned:
            store.unpin(ROOT, key.key)
        check(store)
        gc(store.path, 0)


def test_threads_of_one_store(tmp_path: Path) -> None:
    wrong: list[WriteStatus] = []
    rounds: list[int] = []

    def work(store: BlockStore, salt: str) -> None:
        for turn in range(15):
            statuses = put(store, chain(4, f"{salt}{turn}"))
            wrong.extend(status for status in statuses if status not in (PUBLISHED, FULL))
            rounds.append(turn)

    with open_store(tmp_path, 10) as store:
        threads = [threading.Thread(target=work, args=(store, f"{n}-")) for n in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert published_and_reserved(tmp_path) <= store.capacity_bytes
            time.sleep(0.002)
        assert (wrong, len(rounds)) == ([], 45)
        assert store.counters()["storage_evicted_blocks"] > 0
        check(store)


def published_and_reserved(path: Path) -> int:
    """Bytes of all files, published or private, at one moment: the lock is held meanwhile, so
    nothing is published or removed; what private files come and go has been reserved."""
    with closing(LedgerFile(path)) as file:
        file.lock(soon())
        try:
            return bytes_of_files(path)
        finally:
            file.unlock()


def bytes_of_files(path: Path) -> int:
    sizes: dict[int, int] = {}
    for name in [*(path / "tmp").glob("*/[0-9]*"), *(path / "blocks").glob("*/*/*")]:
        try:
            info = name.stat()
        except FileNotFoundError:
            continue
        sizes[info.st_ino] = max(info.st_size, sizes.get(info.st_ino, 0))
    return sum(sizes.values())


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    capacity = 20 * worker.FILE_BYTES + 100
    processes = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(tmp_path), str(capacity), salt],
            stdout=subprocess.PIPE, text=True,
        )
        for salt in "abc"
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    samples = []
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        samples.append(published_and_reserved(tmp_path))
        time.sleep(0.003)
    for process in processes:
        process.kill()
        out, _ = process.communicate(timeout=20)
        assert "'published'" in out
        assert "evicted" in out
    assert max(samples) <= capacity
    assert max(samples) >= capacity - worker.FILE_BYTES  # the limit was reached, not just kept
    with worker.open_store(str(tmp_path), capacity) as store:
        check(store)
        names = [name for _root, name in store.scan()]
        assert all(
            name.parent == worker.ROOT or name.parent in {n.key for n in names} for name in names
        )
