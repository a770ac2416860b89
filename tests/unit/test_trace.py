"""The trace format: what is read back, and what is refused with which line."""

from __future__ import annotations

import gzip
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.workload.trace import (
    Round,
    TraceError,
    Trajectory,
    format_line,
    parse_line,
    read_trace,
    write_trace,
)

pytestmark = pytest.mark.unit

TOKENS = st.integers(min_value=0, max_value=2**31 - 1)
LATENCY = st.none() | st.floats(min_value=0, max_value=1e9)
ROUNDS = st.lists(st.builds(Round, TOKENS, TOKENS, LATENCY), min_size=1, max_size=8).filter(
    lambda rounds: rounds[0].append_tokens > 0
)
EXTRA = st.dictionaries(
    st.text(min_size=1, max_size=5).filter(lambda key: key not in {"id", "rounds"}),
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.lists(st.text(max_size=3)),
    max_size=3,
)


@given(st.text(min_size=1, max_size=10), ROUNDS, EXTRA)
def test_a_trajectory_survives_the_file_format(
    name: str, rounds: list[Round], extra: dict[str, Any]
) -> None:
    trajectory = Trajectory(name, tuple(rounds), extra)
    assert parse_line(format_line(trajectory)) == trajectory


def test_prompts_grow_by_answer_and_append() -> None:
    trajectory = Trajectory("a", (Round(10, 3, 1.0), Round(5, 0, 0.0), Round(0, 2, None)))
    assert list(trajectory.prompts_tokens()) == [10, 18, 18]
    assert trajectory.total_tokens == 20


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_files_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    trajectories = [Trajectory(f"a{n}", (Round(n + 1, 2, None),), {"k": [n]}) for n in range(5)]
    path = tmp_path / name
    assert write_trace(path, trajectories) == 5
    assert list(read_trace(path)) == trajectories
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    first = path.read_bytes()
    write_trace(path, trajectories)
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_gzip_is_recognised_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(b'{"id":"a","rounds":[[1,1,null]]}\n'))
    assert [item.id for item in read_trace(path)] == ["a"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [Trajectory("old", (Round(1, 1, None),))])

    def broken() -> Any:
        yield Trajectory("new", (Round(1, 1, None),))
        raise RuntimeError("generator failed")

    with pytest.raises(RuntimeError, match="generator failed"):
        write_trace(path, broken())
    assert [item.id for item in read_trace(path)] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


GOOD = '{"id":"a","rounds":[[1,1,null]]}'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id":"a","rounds":[[1,1,-0.5]]}', "rounds[0][2]"),
        ('{"id":"a","rounds":[[1,1,0],[-1,1,0]]}', "rounds[1][0]"),
        ('{"id":"a","rounds":[[1,1,0],[1,"2",0]]}', "rounds[1][1]"),
        ('{"id":"a","rounds":[[1.5,1,0]]}', "rounds[0][0]"),
        ('{"id":"a","rounds":[[true,1,0]]}', "rounds[0][0]"),
        ('{"id":"a","rounds":[[99999999999,1,0]]}', "rounds[0][0]"),
        ('{"id":"a","rounds":[[0,1,0]]}', "rounds[0][0]"),
        ('{"id":"a","rounds":[[1,1]]}', "rounds[0]"),
        ('{"id":"a","rounds":[[1,1,0,9]]}', "rounds"),
        ('{"id":"a","rounds":[[1,1,NaN]]}', "JSON"),
        ('{"id":"a","rounds":[[1,1,1e999]]}', "rounds[0][2]"),
        ('{"id":"a","rounds":[]}', "rounds"),
        ('{"id":"a","rounds":7}', "rounds"),
        ('{"id":"a"}', "rounds: is missing"),
        ('{"rounds":[[1,1,0]]}', "id: is missing"),
        ('{"id":"","rounds":[[1,1,0]]}', "id"),
        ('{"id":5,"rounds":[[1,1,0]]}', "id"),
        ('["a"]', "not a JSON object"),
        ('{"id":"a","rounds":[[1,', "not a JSON object"),
        ("hello", "not a JSON object"),
    ],
)
def test_wrong_lines_name_file_line_and_field(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    seen = []
    with pytest.raises(TraceError) as caught:
        seen.extend(read_trace(path))
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert named in message
    assert "\n" not in message


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id":"\xff\xfe","rounds":[[1,1,null]]}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl:1: "):
        list(read_trace(path))


def test_truncated_and_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    lines = [json.dumps({"id": f"a{n}", "rounds": [[n + 1, n, None]]}) for n in range(500)]
    packed = gzip.compress("\n".join(lines).encode() + b"\n")
    for cut in (5, len(packed) // 2, len(packed) - 4):
        path.write_bytes(packed[:cut])
        with pytest.raises(TraceError, match=r"t\.jsonl\.gz:\d+: gzip stream cut or damaged"):
            list(read_trace(path))
    spoiled = bytearray(packed)
    spoiled[-6] ^= 0xFF  # the checksum
    path.write_bytes(spoiled)
    with pytest.raises(TraceError, match="gzip stream cut or damaged"):
        list(read_trace(path))


def test_absent_folder_and_empty(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        list(read_trace(tmp_path))
    empty = tmp_path / "empty"
    for content in ("", "\n\n"):
        empty.write_text(content)
        with pytest.raises(TraceError, match="holds no trajectories"):
            list(read_trace(empty))


def test_reading_does_not_keep_what_was_read(tmp_path: Path) -> None:
    rounds = tuple(Round(5, 5, None) for _ in range(50))
    path = tmp_path / "t.jsonl"
    write_trace(path, (Trajectory(f"a{n}", rounds) for n in range(4000)))
    peaks = []
    for count in (200, 4000):
        tracemalloc.start()
        assert sum(1 for _ in itertools.islice(read_trace(path), count)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
