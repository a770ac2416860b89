"""Merging and cutting of range lists: the same bytes, in other portions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.transfer.descriptors import Descriptors, descriptors
from dualpath.transfer.reads import Ask, decode, encode

pytestmark = pytest.mark.unit


def bytes_of(ranges: Descriptors) -> set[tuple[int, int]]:
    """Every (local, remote) byte pair."""
    return {
        (int(local) + offset, int(remote) + offset)
        for local, remote, size in zip(ranges.local, ranges.remote, ranges.sizes, strict=True)
        for offset in range(int(size))
    }


@st.composite
def range_lists(draw: st.DrawFn) -> Descriptors:
    """Blocks of a source laid out in another order at the target, with gaps here and there."""
    count = draw(st.integers(1, 12))
    size = draw(st.integers(1, 5))
    local = draw(st.permutations(range(count)))
    remote = draw(st.permutations(range(count)))
    if draw(st.booleans()):
        remote = local
    sizes = [size] * count
    if draw(st.booleans()):
        sizes = [draw(st.integers(1, size)) for _ in range(count)]
    return descriptors([1000 + x * size for x in local], [5000 + x * size for x in remote], sizes)


@given(range_lists())
def test_merging_keeps_every_byte_pair(ranges: Descriptors) -> None:
    merged = ranges.merged()
    assert bytes_of(merged) == bytes_of(ranges)
    assert merged.nbytes == ranges.nbytes
    ends = list(zip(merged.local + merged.sizes, merged.remote + merged.sizes, strict=True))
    starts = list(zip(merged.local, merged.remote, strict=True))
    assert not set(ends[:-1]) & set(starts[1:]), "neighbours were left apart"


@given(range_lists(), st.integers(1, 20), st.integers(1, 4))
def test_pieces_partition_the_bytes(ranges: Descriptors, piece_bytes: int, most: int) -> None:
    pieces = list(ranges.pieces(piece_bytes, most))
    assert sum(piece.nbytes for piece in pieces) == ranges.nbytes
    assert set().union(*map(bytes_of, pieces)) == bytes_of(ranges)
    assert all(0 < piece.nbytes <= piece_bytes and 0 < len(piece) <= most for piece in pieces)


def test_contiguous_run_becomes_one() -> None:
    blocks = np.arange(2048)
    shuffled = np.random.default_rng(0).permutation(blocks)
    merged = descriptors(65536 * (1 + shuffled), (1 << 40) + 65536 * shuffled, 65536).merged()
    assert len(merged) == 1 and merged.nbytes == 2048 * 65536
    assert merged.rows(remote=True).tolist() == [[1 << 40, 2048 * 65536, 0]]


@given(range_lists(), st.integers(1, 2**40))
def test_request_to_the_owner_swaps_the_sides(ranges: Descriptors, number: int) -> None:
    ask = decode(encode(Ask.of(number, ranges)))
    assert isinstance(ask, Ask) and ask.number == number
    assert bytes_of(ask.ranges()) == {(remote, local) for local, remote in bytes_of(ranges)}


@pytest.mark.parametrize("source", [b"", b"123", b"12345678" * 2])
def test_malformed_request_is_refused(source: bytes) -> None:
    with pytest.raises(ValueError):
        Ask(1, source, b"12345678", b"\1\0\0\0\0\0\0\0").ranges()
