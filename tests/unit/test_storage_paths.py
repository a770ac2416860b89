"""Block names can be read back from a listing, and nothing else passes for one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.storage import BlockId, scan_blocks
from dualpath.storage.paths import block_name, block_path, parse_name

pytestmark = pytest.mark.unit

digests = st.binary(min_size=32, max_size=32)


@given(digests, digests)
def test_a_name_says_key_and_parent(key: bytes, parent: bytes) -> None:
    block = BlockId(key, parent)
    assert parse_name(block_name(block)) == block


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "a" * 64,
        "a" * 64 + "-" + "b" * 64,
        "A" * 64 + "." + "b" * 64,
        "g" * 64 + "." + "b" * 64,
        "a" * 64 + "." + "b" * 65,
        "a" * 62 + "  ." + "b" * 64,
        " " * 64 + "." + "b" * 64,
    ],
)
def test_other_names_are_no_blocks(name: str) -> None:
    assert parse_name(name) is None


def test_a_scan_opens_no_file_and_skips_strays(tmp_path: Path) -> None:
    roots = [bytes([n]) * 32 for n in (1, 2)]
    expected = set()
    for root in roots:
        for n in range(5):
            block = BlockId(bytes([n, 7]) + root[:30], root)
            path = block_path(tmp_path, root, block)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to("/nonexistent")  # opening it would fail
            expected.add((root, block))
    stray = BlockId(b"\xee" * 32, roots[0])
    (block_path(tmp_path, roots[0], expected.copy().pop()[1]).parent.parent / "zz").mkdir()
    (tmp_path / "blocks" / "notes.txt").write_text("x")
    wrong_folder = tmp_path / "blocks" / roots[0].hex() / "00" / block_name(stray)
    wrong_folder.parent.mkdir(exist_ok=True)
    wrong_folder.touch()

    assert set(scan_blocks(tmp_path)) == expected
    assert set(scan_blocks(tmp_path, roots[1])) == {e for e in expected if e[0] == roots[1]}
    assert list(scan_blocks(tmp_path, b"\x09" * 32)) == []


def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert list(scan_blocks(tmp_path / "none")) == []
