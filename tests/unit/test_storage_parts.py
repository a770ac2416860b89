"""Parts of a batch that overlap."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.storage.parts import MOST_PARTS, PART_BYTES, Parts, spans

pytestmark = pytest.mark.unit


@given(st.integers(1, 200), st.integers(1, 64 << 20))
def test_parts_cover_the_batch_and_are_not_small(count: int, block_bytes: int) -> None:
    parts = spans(count, block_bytes)
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) <= MOST_PARTS
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == 1 or min(sizes) > 0
    assert len(parts) == 1 or count * block_bytes // len(parts) >= PART_BYTES


def test_a_batch_ends_when_all_of_it_is_over_though_a_part_failed() -> None:
    entered = threading.Barrier(MOST_PARTS)
    over: list[int] = []

    def work(span: slice) -> None:
        entered.wait(10)  # all parts are under way at once
        if span.start == 0:
            raise OSError("first")
        time.sleep(0.02 * span.start)
        over.append(span.start)
        if span.start == 1:
            raise OSError("second")

    with closing(Parts()) as parts:
        with pytest.raises(OSError, match="first"):
            parts.run(work, MOST_PARTS, PART_BYTES)
        assert over == [1, 2, 3]
        done: list[slice] = []
        parts.run(done.append, 3, 1000)
        assert done == [slice(0, 3)]
