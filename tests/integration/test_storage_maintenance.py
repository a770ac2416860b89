"""Statistics, check and eviction on real store directories."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_kit import LAYOUT, ROOT, chain, filled, path_of, soon

from dualpath.storage import BlockId, BlockStore, WriteStatus, scan_blocks
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.maintenance import fsck, gc, stats

pytestmark = pytest.mark.integration

FILE_BYTES = HEADER_BYTES + LAYOUT.slot_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore.open(tmp_path, LAYOUT, io="threads", direct="off", fsync=False) as opened:
        yield opened


def put(store: BlockStore, blocks: list[BlockId], root: bytes = ROOT) -> None:
    statuses = store.write(root, blocks, filled(blocks), soon())
    assert set(statuses) == {WriteStatus.PUBLISHED}


def used_at(store: BlockStore, block: BlockId, when_s: float) -> None:
    os.utime(path_of(store.path, block), (when_s, when_s))


def test_stats_by_namespace(store: BlockStore) -> None:
    other = bytes(32)
    blocks = chain(5)
    put(store, blocks)
    put(store, chain(2, "x", other), other)
    store.remove(ROOT, blocks[1])  # 2, 3 and 4 hang in the air now
    found = stats(store.path)
    assert {
        root: (s.blocks, s.stored_bytes, s.unreachable_blocks) for root, s in found.items()
    } == {
        ROOT: (4, 4 * FILE_BYTES, 3),
        other: (2, 2 * FILE_BYTES, 0),
    }
    assert stats(store.path / "nothing") == {}


def test_fsck_finds_and_repairs(store: BlockStore) -> None:
    blocks = chain(5)
    put(store, blocks)
    flipped = path_of(store.path, blocks[1])
    raw = bytearray(flipped.read_bytes())
    raw[5000] ^= 4
    flipped.write_bytes(raw)
    os.truncate(path_of(store.path, blocks[2]), FILE_BYTES - 1)
    path_of(store.path, blocks[3]).write_bytes(b"")
    report = fsck(store.path)
    assert report.checked == 5
    assert {block for _root, block, _reason in report.corrupt} == set(blocks[1:4])
    assert report.removed == 0
    assert fsck(store.path, repair=True).removed == 3
    clean = fsck(store.path)
    assert (clean.checked, clean.corrupt) == (2, [])


def test_gc_takes_the_least_recently_used_leaf(store: BlockStore) -> None:
    old, new = chain(3, "old"), chain(3, "new")
    now = time.time()
    for index, block in enumerate(old + new):
        put(store, [block])
        used_at(store, block, now - 1000 + index)
    # A parent that looks older than its child still outlives it.
    used_at(store, old[0], now - 5000)
    report = gc(store.path, 4 * FILE_BYTES)
    assert [block for _root, block in report.removed] == [old[2], old[1]]
    assert (report.freed_bytes, report.kept_bytes) == (2 * FILE_BYTES, 4 * FILE_BYTES)
    assert gc(store.path, 4 * FILE_BYTES).removed == []


def test_gc_takes_unreachable_blocks_first(store: BlockStore) -> None:
    gone, kept = chain(4, "gone"), chain(2, "kept")
    put(store, gone + kept)
    store.remove(ROOT, gone[0])
    for block in kept:
        used_at(store, block, 1000.0)
    report = gc(store.path, 2 * FILE_BYTES)
    assert [block for _root, block in report.removed] == [gone[3], gone[2], gone[1]]


def test_gc_spares_what_was_just_used(store: BlockStore) -> None:
    blocks = chain(3)
    put(store, blocks)
    used_at(store, blocks[2], time.time() - 100)
    report = gc(store.path, 0, min_age_s=50)
    assert [block for _root, block in report.removed] == [blocks[2]]
    assert report.kept_bytes == 2 * FILE_BYTES


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parents=st.lists(st.integers(-1, 30), min_size=1, max_size=12),
    ages=st.lists(st.integers(0, 1000), min_size=12, max_size=12),
    target=st.integers(0, 12),
)
def test_gc_never_leaves_a_gap(
    store: BlockStore, parents: list[int], ages: list[int], target: int
) -> None:
    names = chain(len(parents), "tree")
    blocks = [
        BlockId(name.key, ROOT if parent < 0 or not i else names[parent % i].key)
        for i, (name, parent) in enumerate(zip(names, parents, strict=True))
    ]
    put(store, blocks)
    for block, age in zip(blocks, ages, strict=False):
        used_at(store, block, 1e9 + age)
    gc(store.path, target * FILE_BYTES)
    left = {block.key: block.parent for _root, block in scan_blocks(store.path)}
    assert len(left) == min(target, len(blocks))
    assert all(parent == ROOT or parent in left for parent in left.values())
    gc(store.path, 0)
