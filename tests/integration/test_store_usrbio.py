"""USRBIO: what our code does with 3FS's C ABI, when all is well and when it is not.

The library here is a stand-in of the same ABI (``usrbio_shim/shim.c``); 3FS itself is not tested.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EIO, ENOMEM, ENOSPC, EROFS
from pathlib import Path

import pytest
from storage_kit import LAYOUT, ROOT, chain, content, empty, filled, leftovers, soon
from store_kinds import OBJECT_BYTES

from dualpath.config import Size, StorageConfig
from dualpath.storage import (
    BlockStore,
    ReadStatus,
    StoreError,
    UnsupportedIoError,
    WriteStatus,
    buffer_memory,
    open_store,
)

pytestmark = pytest.mark.integration

PUBLISHED, OK, EXPIRED = WriteStatus.PUBLISHED, ReadStatus.OK, ReadStatus.EXPIRED
SETTINGS = ("delay_ms", "hold", "fail_errno", "fail_after", "short_bytes", "no_iov")
ALIVE = ("iovs", "rings", "files")


class Shim:
    """The stand-in's switches and counts, by name."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, f"shim_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, f"shim_{name}").value = value


@pytest.fixture
def shim(usrbio_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shim]:
    """All is well with it at the start; nothing may be left, and no rule broken, at the end."""
    monkeypatch.setenv("DUALPATH_SHIM_MOUNT", str(tmp_path))
    shim = Shim(usrbio_library)
    before = {name: shim[name] for name in ALIVE}
    yield shim
    for name in SETTINGS:
        shim[name] = 0
    assert {name: shim[name] for name in ALIVE} == before
    assert shim["violations"] == 0


def described(tmp_path: Path, library: Path, **changes: object) -> StorageConfig:
    options: dict[str, object] = {
        "path": str(tmp_path / "store"), "io": "usrbio", "usrbio_library": str(library),
        "fsync": False, "batch_blocks": 4, **changes,
    }  # fmt: skip
    return StorageConfig(**options)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path, usrbio_library: Path, shim: Shim) -> Iterator[BlockStore]:
    opened = open_store(described(tmp_path, usrbio_library), LAYOUT)
    assert isinstance(opened, BlockStore)
    with opened:
        yield opened
        for name in SETTINGS:
            shim[name] = 0
    assert leftovers(tmp_path / "store") == []


def put(store: BlockStore, count: int = 4, salt: str = "") -> list[WriteStatus]:
    blocks = chain(count, salt)
    return store.write(ROOT, blocks, filled(blocks), soon())


def test_one_submission_for_a_batch(store: BlockStore, shim: Shim) -> None:
    submits, reads, writes = shim["submits"], shim["reads"], shim["writes"]
    assert put(store, 4) == [PUBLISHED] * 4
    assert store.read(ROOT, chain(4), empty(4), soon()) == [OK] * 4
    assert (shim["submits"] - submits, shim["writes"] - writes, shim["reads"] - reads) == (2, 4, 4)
    assert (store.io_name, store.direct) == ("usrbio", True)


def test_slots_in_shared_memory_are_used_in_place(
    tmp_path: Path, usrbio_library: Path, store: BlockStore, shim: Shim
) -> None:
    blocks = chain(4)
    memory = buffer_memory(
        described(tmp_path, usrbio_library), 8 * LAYOUT.slot_bytes, LAYOUT.slot_bytes
    )
    assert memory is not None
    view = memory.view()
    slots = [
        view[i * LAYOUT.slot_bytes : (i + 1) * LAYOUT.slot_bytes] for i in range(8)
    ]  # one end of the memory to the other
    for slot, block in zip(slots[:4], blocks, strict=True):
        slot[:] = content(block, LAYOUT.slot_bytes)
    writes = shim["writes"]
    assert store.write(ROOT, blocks, slots[:4], soon()) == [PUBLISHED] * 4
    assert shim["writes"] - writes == 8  # header and slot, each from where it is
    assert store.read(ROOT, blocks, slots[4:], soon()) == [OK] * 4
    assert [bytes(slot) for slot in slots[4:]] == [bytes(slot) for slot in slots[:4]]
    # What was written in place is read elsewhere as well.
    assert store.read(ROOT, blocks, empty(4), soon()) == [OK] * 4
    del slots
    view.release()
    memory.close()


def test_a_read_that_hangs_is_given_up_and_never_reaches_the_slots(
    store: BlockStore, shim: Shim
) -> None:
    put(store)
    shim["hold"] = 1
    slots = empty(4)
    assert store.read(ROOT, chain(4), slots, time.monotonic() + 0.2) == [EXPIRED] * 4
    assert store._io.stuck_lanes == 1  # type: ignore[attr-defined]
    shim["hold"] = 0
    reads = shim["reads"]
    while shim["reads"] < reads + 4:  # what was given up comes in now
        time.sleep(0.005)
    assert all(not any(slot) for slot in slots)
    # The lane comes back and is as good as before.
    for _ in range(5):
        assert store.read(ROOT, chain(4), slots, soon()) == [OK] * 4
    assert store._io.stuck_lanes == 0  # type: ignore[attr-defined]


def test_a_read_into_shared_slots_is_waited_for(
    tmp_path: Path, usrbio_library: Path, store: BlockStore, shim: Shim
) -> None:
    put(store, 2)
    memory = buffer_memory(
        described(tmp_path, usrbio_library), 2 * LAYOUT.slot_bytes, LAYOUT.slot_bytes
    )
    assert memory is not None
    view = memory.view()
    slots = [view[: LAYOUT.slot_bytes], view[LAYOUT.slot_bytes :]]
    shim["hold"] = 1
    released = threading.Event()

    def release() -> None:
        time.sleep(0.4)
        released.set()
        shim["hold"] = 0

    with ThreadPoolExecutor(1) as pool:
        pool.submit(release)
        statuses = store.read(ROOT, chain(2), slots, time.monotonic() + 0.1)
    # Past its deadline, but not before 3FS had let go of the slots.
    assert released.is_set()
    assert statuses == [OK] * 2
    del slots
    view.release()
    memory.close()


def test_a_daemon_that_answers_nothing_does_not_eat_all_memory(
    store: BlockStore, shim: Shim
) -> None:
    put(store)
    shim["hold"] = 1
    iovs = shim["iovs"]
    outcomes = [store.read(ROOT, chain(1), empty(1), time.monotonic() + 0.03)[0] for _ in range(12)]
    assert outcomes == [EXPIRED] * 8 + [ReadStatus.FAILED] * 4
    assert shim["iovs"] - iovs <= 8
    shim["hold"] = 0
    end_s = time.monotonic() + 10
    while store.read(ROOT, chain(1), empty(1), soon()) != [OK]:
        assert time.monotonic() < end_s


@pytest.mark.parametrize(
    ("code", "status"),
    [(EIO, WriteStatus.FAILED), (ENOSPC, WriteStatus.FULL), (EROFS, WriteStatus.READ_ONLY)],
)
def test_a_refused_write_is_an_outcome(
    store: BlockStore, shim: Shim, code: int, status: WriteStatus
) -> None:
    shim["fail_errno"] = code
    assert put(store) == [status] * 4
    assert list(store.scan()) == []
    shim["fail_errno"] = 0
    assert put(store) == [PUBLISHED] * 4


def test_a_write_that_ends_early_publishes_nothing(store: BlockStore, shim: Shim) -> None:
    shim["short_bytes"] = 100
    assert put(store) == [WriteStatus.FAILED] * 4
    assert list(store.scan()) == []


def test_a_read_that_fails_leaves_the_block(store: BlockStore, shim: Shim) -> None:
    put(store)
    shim["fail_errno"] = EIO
    assert store.read(ROOT, chain(4), empty(4), soon()) == [ReadStatus.FAILED] * 4
    shim["fail_errno"] = 0
    assert store.read(ROOT, chain(4), empty(4), soon()) == [OK] * 4


def test_each_block_has_its_own_outcome(store: BlockStore, shim: Shim) -> None:
    good = shim["writes"] + shim["reads"]
    shim["fail_after"], shim["fail_errno"] = good + 2, EIO
    statuses = put(store)
    assert statuses == [PUBLISHED] * 2 + [WriteStatus.FAILED] * 2
    assert {block for _root, block in store.scan()} == set(chain(2))


def test_threads_at_once(store: BlockStore, shim: Shim) -> None:
    shim["delay_ms"] = 1

    def work(number: int) -> None:
        blocks = chain(6, str(number))
        assert put(store, 6, str(number)) == [PUBLISHED] * 6
        slots = empty(6)
        assert store.read(ROOT, blocks, slots, soon()) == [OK] * 6
        for block, slot in zip(blocks, slots, strict=True):
            assert bytes(slot) == content(block, LAYOUT.slot_bytes)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert shim["violations"] == 0


def test_what_is_not_there_is_refused_at_open(
    tmp_path: Path, usrbio_library: Path, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(text: str, **changes: object) -> None:
        with pytest.raises(StoreError, match=text):
            open_store(described(tmp_path, usrbio_library, **changes), LAYOUT)
        assert list((tmp_path / "store" / "tmp").glob("*")) == []

    refused("usrbio_library", usrbio_library="libdualpath-there-is-none.so")
    refused("leave it out", direct="on")
    shim["no_iov"] = ENOMEM
    refused("hf3fs_iovcreate")
    shim["no_iov"] = 0
    shim["fail_errno"] = EIO
    refused("self-test")
    shim["fail_errno"] = 0
    monkeypatch.setenv("DUALPATH_SHIM_MOUNT", "/elsewhere")
    refused("not below a 3FS mount")
    with pytest.raises(UnsupportedIoError, match="not below"):
        buffer_memory(described(tmp_path, usrbio_library), LAYOUT.slot_bytes, LAYOUT.slot_bytes)


def test_hosts_that_cannot_see_each_others_locks(
    tmp_path: Path, usrbio_library: Path, shim: Shim
) -> None:
    """3FS's locks end at the host: another's files are left alone, and no account is shared."""
    storage = described(tmp_path, usrbio_library)
    theirs = tmp_path / "store" / "tmp" / "77-abc@another-host"
    theirs.mkdir(parents=True)
    (theirs / "0").write_bytes(b"a block on its way")
    with open_store(storage, LAYOUT) as store:
        assert store.writable
        (own,) = [path for path in theirs.parent.iterdir() if path.is_dir() and path != theirs]
        assert "@" in own.name
    assert (theirs / "0").exists()
    limited = described(tmp_path, usrbio_library, capacity=Size(9 * OBJECT_BYTES))
    with pytest.raises(StoreError, match="do not reach other hosts"):
        open_store(limited, LAYOUT)
