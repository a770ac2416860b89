"""A disk on which no file can even be made: every block is refused, and reading goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from storage_kit import LAYOUT, ROOT, chain, content, empty, filled, leftovers, soon

from dualpath.storage import BlockStore, ReadStatus, WriteStatus
from dualpath.storage.writing import BlockWriter

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("io", ["threads", "nixl"])
def test_no_file_can_be_made(tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if io == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    blocks = chain(3)
    store = BlockStore.open(tmp_path, LAYOUT, io=io, fsync=False)
    try:
        first, others = blocks[:1], blocks[1:]
        assert store.write(ROOT, first, filled(first), soon()) == [WriteStatus.PUBLISHED]
        with monkeypatch.context() as full:
            full.setattr(BlockWriter, "_draft", lambda *_: errno.ENOSPC)
            for _ in range(2):  # the second time because of the first
                assert store.write(ROOT, others, filled(others), soon()) == [WriteStatus.FULL] * 2
        slots = empty(3)
        missing = ReadStatus.MISSING
        assert store.read(ROOT, blocks, slots, soon()) == [ReadStatus.OK, missing, missing]
        assert bytes(slots[0]) == content(blocks[0], LAYOUT.slot_bytes)
        assert store.write(ROOT, others, filled(others), soon()) == [WriteStatus.PUBLISHED] * 2
        assert leftovers(tmp_path) == []
    finally:
        store.close()
