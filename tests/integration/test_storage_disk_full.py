"""A disk that is full: old blocks go, never one in use, never a parent before its children."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import LAYOUT, ROOT, chain, empty, filled, leftovers, soon

from dualpath.storage import BlockId, BlockStore, ReadStatus, WriteStatus
from dualpath.storage import store as store_module
from dualpath.storage.forest import Forest
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.maintenance import gc
from dualpath.storage.tempdir import TempArea
from dualpath.storage.writing import BlockWriter

pytestmark = pytest.mark.integration

FILE_BYTES = HEADER_BYTES + LAYOUT.slot_bytes
PUBLISHED, FULL = WriteStatus.PUBLISHED, WriteStatus.FULL


def open_store(path: Path, io: str = "threads", fsync: bool = False) -> BlockStore:
    return BlockStore.open(path, LAYOUT, io=io, direct="off", fsync=fsync, batch_blocks=4)


def put(store: BlockStore, blocks: list[BlockId]) -> list[WriteStatus]:
    return store.write(ROOT, blocks, filled(blocks), soon())


def stored(path: Path) -> set[BlockId]:
    """What is there, which is without gaps."""
    files = Forest.scan(path)
    assert len(files.reachable()) == len(files.files)
    return {file.block for file in files.files.values()}


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system with room for some tens of blocks."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path / "disk"
    path.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    else:
        image = tmp_path / "image"
        image.write_bytes(bytes(2 << 20))
        options = ["-q", "-m", "0", "-b", "4096", "-O", "^has_journal"]
        try:
            subprocess.run(["mkfs.ext4", *options, str(image)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no mkfs.ext4: {error}")
        mount = ["mount", "-o", "loop", str(image), str(path)]
    made = subprocess.run(mount, capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("fsync", [False, True])
def test_the_least_recently_used_blocks_go(disk: Path, fsync: bool) -> None:
    with open_store(disk, fsync=fsync) as store, open_store(disk) as other:
        held = chain(6, "held")
        assert put(store, held) == [PUBLISHED] * 6
        other.pin(ROOT, held[-1].key, soon())  # whoever holds it, it stays
        for turn in range(60):
            assert put(store, chain(5, f"{turn}")) == [PUBLISHED] * 5
            assert leftovers(disk) == []
        there = stored(disk)
        assert there >= {*held, *chain(5, "59"), *chain(5, "58")}
        assert not there & set(chain(5, "0"))
        counters = store.counters()
        assert counters["storage_disk_full_bytes"] == counters["storage_evicted_bytes"]
        gone = counters["storage_evicted_blocks"]
        assert gone == 6 + 60 * 5 - len(there)
        assert sum(len(keys) for keys in store.take_evicted().values()) == gone
        slots = empty(6)
        assert store.read(ROOT, held, slots, soon()) == [ReadStatus.OK] * 6
        other.unpin(ROOT, held[-1].key)


@pytest.mark.root
def test_a_store_is_opened_on_a_full_disk(disk: Path) -> None:
    with open_store(disk) as store:
        put(store, chain(12, "old"))
    (disk / "filler").touch()
    with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(4096))
    with open_store(disk) as store:
        assert store.writable
        assert put(store, chain(3, "new")) == [PUBLISHED] * 3
        assert stored(disk) >= set(chain(3, "new"))


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a disk that takes no further block when it has 20."""
    draft = BlockWriter._draft

    def with_limit(self: BlockWriter, *rest: object) -> object:
        files = sum(path.name != "hold" for path in (self.store / "tmp").glob("*/*"))
        if files + len(Forest.scan(self.store).files) >= 20:
            return errno.ENOSPC
        return draft(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockWriter, "_draft", with_limit)
    return 20


def test_a_full_disk_without_root(tmp_path: Path, places: int) -> None:
    with open_store(tmp_path) as store:
        for turn in range(12):
            assert put(store, chain(4, f"{turn}")) == [PUBLISHED] * 4
        assert places - 8 < len(stored(tmp_path)) <= places
        assert store.counters()["storage_disk_full_bytes"] > 0


def test_all_that_is_stored_is_in_use(
    tmp_path: Path, places: int, caplog: pytest.LogCaptureFixture
) -> None:
    held, new = chain(places, "held"), chain(3, "new")
    with open_store(tmp_path) as store:
        put(store, held)
        store.pin(ROOT, held[-1].key, soon())
        assert put(store, new) == [FULL] * 3
        assert "free the disk or its quota" in caplog.text
        store.unpin(ROOT, held[-1].key)
        # It helped nothing, so for a while nothing more is tried: others may be filling the disk.
        assert put(store, new) == [FULL] * 3
        assert stored(tmp_path) == set(held)
    with open_store(tmp_path) as store:
        assert put(store, new) == [PUBLISHED] * 3
        assert stored(tmp_path) >= {*held[:10], *new}


def test_eviction_that_does_not_help_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota in which our files do not count, or somebody who fills the disk as fast."""
    with open_store(tmp_path) as store:
        put(store, chain(40))
        monkeypatch.setattr(BlockWriter, "_draft", lambda *_: errno.EDQUOT)
        for turn in range(20):
            assert put(store, chain(1, f"{turn}")) == [FULL]
        assert len(stored(tmp_path)) >= 40 - 2 * 2


def test_a_file_size_limit_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        put(store, chain(8))
        monkeypatch.setattr(BlockWriter, "_draft", lambda *_: errno.EFBIG)
        assert put(store, chain(1, "new")) == [FULL]
        assert len(stored(tmp_path)) == 8


def test_nothing_goes_while_a_writer_keeps_no_account(
    tmp_path: Path, places: int, caplog: pytest.LogCaptureFixture
) -> None:
    old = chain(places, "old")
    with open_store(tmp_path) as store:
        put(store, old)
        stranger = TempArea.create(tmp_path / "tmp")
        assert put(store, chain(2, "new")) == [FULL] * 2
        assert "give all engines the same storage.capacity" in caplog.text
        assert stored(tmp_path) == set(old)
        stranger.close()


def test_a_file_system_that_many_share(
    tmp_path: Path, places: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No lock a batch there without being asked; the log says what to do instead, and it helps."""
    monkeypatch.setattr(store_module, "is_of_one_machine", lambda _: False)
    old = chain(places, "old")
    with open_store(tmp_path) as store, caplog.at_level(logging.WARNING):
        assert not store.evicts
        assert put(store, old) == [PUBLISHED] * places
        assert put(store, chain(2, "new")) == [FULL] * 2
        assert "dualpath store gc --target" in caplog.text
        assert not (tmp_path / "capacity").exists()
        gc(tmp_path, 10 * FILE_BYTES)
        assert put(store, chain(2, "new")) == [PUBLISHED] * 2
