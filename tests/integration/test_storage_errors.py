"""File systems that refuse: each refusal is an outcome, and nothing is left behind."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import LAYOUT, ROOT, chain, content, empty, filled, leftovers, path_of, soon

from dualpath.storage import BlockStore, ReadStatus, StoreError, WriteStatus
from dualpath.storage.nixl_module import find_nixl
from dualpath.storage.types import status_of

pytestmark = pytest.mark.integration

needs_nixl = pytest.mark.skipif(find_nixl() is None, reason="NIXL is not installed")
both = pytest.mark.parametrize("io", ["threads", pytest.param("nixl", marks=needs_nixl)])


def open_store(path: Path, io: str = "threads", direct: str = "auto") -> BlockStore:
    return BlockStore.open(path, LAYOUT, io=io, direct=direct, fsync=True, batch_blocks=4)


def test_a_store_that_vanished(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = open_store(path)
    blocks = chain(3)
    store.write(ROOT, blocks, filled(blocks), soon())
    shutil.rmtree(path)
    assert store.read(ROOT, blocks, empty(3), soon()) == [ReadStatus.MISSING] * 3
    assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.FAILED] * 3
    assert not path.exists()  # it is not made again under a mount point that came off
    store.close()


def test_a_blocks_folder_that_vanished(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        shutil.rmtree(tmp_path / "blocks")
        blocks = chain(3)
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.FAILED] * 3
        assert leftovers(tmp_path) == []
        (tmp_path / "blocks").mkdir()
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PUBLISHED] * 3


def test_without_hard_links_blocks_are_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with open_store(tmp_path) as store:
        blocks = chain(6)
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PUBLISHED] * 6
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.PRESENT] * 6
        assert store.read(ROOT, blocks, empty(6), soon()) == [ReadStatus.OK] * 6
        assert leftovers(tmp_path) == []


def test_a_folder_in_a_blocks_place_is_a_failure(tmp_path: Path) -> None:
    with open_store(tmp_path, direct="off") as store:
        block = chain(1)[0]
        path_of(tmp_path, block).mkdir(parents=True)
        assert store.read(ROOT, [block], empty(1), soon()) == [ReadStatus.FAILED]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
@both
def test_a_full_disk(small_disk: Path, io: str) -> None:
    blocks = chain(40)
    with open_store(small_disk, io) as store:
        statuses = store.write(ROOT, blocks, filled(blocks), soon())
        assert set(statuses) == {WriteStatus.PUBLISHED, WriteStatus.FULL}
        assert leftovers(small_disk) == []
        slots = empty(40)
        read = store.read(ROOT, blocks, slots, soon())
        for block, slot, wrote, got in zip(blocks, slots, statuses, read, strict=True):
            published = wrote is WriteStatus.PUBLISHED
            assert got is (ReadStatus.OK if published else ReadStatus.MISSING)
            if published:
                assert bytes(slot) == content(block, LAYOUT.slot_bytes)
        # Room comes back: so do writes.
        kept = [b for b, s in zip(blocks, statuses, strict=True) if s is WriteStatus.PUBLISHED]
        for block in kept:
            store.remove(ROOT, block)
        assert store.write(ROOT, kept[:4], filled(kept[:4]), soon()) == [WriteStatus.PUBLISHED] * 4


@pytest.mark.root
def test_a_read_only_disk_is_read(small_disk: Path) -> None:
    blocks = chain(3)
    with open_store(small_disk) as store:
        store.write(ROOT, blocks[:2], filled(blocks[:2]), soon())
    path = path_of(small_disk, blocks[1])
    raw = bytearray(path.read_bytes())
    raw[9000] ^= 1
    path.write_bytes(raw)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with open_store(small_disk) as store:
        assert not store.writable
        slots = empty(2)
        statuses = store.read(ROOT, blocks[:2], slots, soon())
        assert statuses == [ReadStatus.OK, ReadStatus.CORRUPT]
        assert bytes(slots[0]) == content(blocks[0], LAYOUT.slot_bytes)
        assert store.counters()["storage_corrupt_kept"] == 1
        assert store.write(ROOT, blocks, filled(blocks), soon()) == [WriteStatus.READ_ONLY] * 3


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.ENOSPC, WriteStatus.FULL),
        (errno.EDQUOT, WriteStatus.FULL),
        (errno.EROFS, WriteStatus.READ_ONLY),
        (errno.EACCES, WriteStatus.READ_ONLY),
        (errno.EIO, WriteStatus.FAILED),
        (errno.ESTALE, WriteStatus.FAILED),
        (errno.ETIMEDOUT, WriteStatus.EXPIRED),
    ],
)
def test_what_an_errno_means(code: int, status: WriteStatus) -> None:
    assert status_of(code) is status


@pytest.mark.root
def test_an_empty_read_only_disk_is_no_store(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="cannot be used"):
        open_store(small_disk)
