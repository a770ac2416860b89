"""Regions: addresses and views are the same bytes."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from dualpath.transfer.memory import Region

pytestmark = pytest.mark.unit


def test_address_and_view_are_the_same_bytes() -> None:
    with Region(3 * mmap.PAGESIZE) as region:
        assert region.address % mmap.PAGESIZE == 0
        assert bytes(region.view()) == bytes(region.nbytes)
        region.view(100, 4)[:] = b"abcd"
        assert ctypes.string_at(region.address + 100, 4) == b"abcd"
        ctypes.memset(region.address + 102, ord("z"), 1)
        assert bytes(region.view(100, 4)) == b"abzd"
        assert region.contains(region.address, region.nbytes)
        assert not region.contains(region.address + 1, region.nbytes)


def test_views_stay_inside() -> None:
    with Region(4096) as region:
        for offset, nbytes in [(0, 4097), (-1, 2), (4096, 1), (10, -1)]:
            with pytest.raises(ValueError, match="outside"):
                region.view(offset, nbytes)
        assert len(region.view(4096)) == 0


def test_populated_memory_is_resident() -> None:
    size = 64 << 20

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    with Region(size):
        assert resident() - before < size // 2
    with Region(size, populate=True):
        assert resident() - before > size // 2


def test_close_waits_for_the_last_view_and_is_idempotent() -> None:
    region = Region(4096)
    view = region.view(0, 8)
    region.close()
    region.close()
    assert region.closed
    view[:] = b"12345678"
    assert bytes(view) == b"12345678"
    with pytest.raises(ValueError, match="closed"):
        region.view()


def test_borrowed_memory_keeps_its_owner_until_closed() -> None:
    class Owner:
        alive = 0

        def __init__(self) -> None:
            self.data = np.arange(256, dtype=np.uint8)
            Owner.alive += 1

        def __del__(self) -> None:
            Owner.alive -= 1

    owner = Owner()
    region = Region.borrowed(owner.data.ctypes.data, 256, owner)
    assert bytes(region.view(3, 2)) == b"\x03\x04"
    region.view(0, 1)[:] = b"\xff"
    assert owner.data[0] == 255
    del owner
    gc.collect()
    assert Owner.alive == 1
    region.close()
    gc.collect()
    assert Owner.alive == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError):
        Region(0)
    with pytest.raises(ValueError):
        Region.borrowed(0, 4096, None)
