"""The programs in benchmarks/ run, and end with one line of JSON. (What they measure is not judged
here: that needs a quiet machine.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def figures(name: str, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--json", *options],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {"cpus", "kernel", "load_1m"} <= result["machine"].keys()
    return result


def test_storage(tmp_path: Path) -> None:
    options = ("--total-mib", "8", "--rounds", "1", "--block-mib", "1", "--many", "300")
    found = figures("storage.py", "--dir", str(tmp_path), "--io", "threads", *options)
    ways = {(row["op"], row["direct"], row["fsync"]) for row in found["rows"]}
    buffered = {("write", False, False), ("read", False, False), ("write", False, True)}
    assert buffered <= ways
    assert len(ways) + len(found["skipped"]) * 2 >= 6, "O_DIRECT may be refused here, with reasons"
    assert all(row["gbs"] > 0 for row in found["rows"])
    assert found["open"]["blocks"] == 300
    assert list(tmp_path.iterdir()) == []


def test_push() -> None:
    found = figures("push.py", "--total-mib", "16", "--rounds", "1", "--range-kib", "64", "1024")
    assert [row["range_bytes"] for row in found["rows"]] == [64 << 10, 1 << 20]
    for row in found["rows"]:
        assert row["sender_cpu_s_per_gb"] > 0
        assert row["receiver_cpu_s_per_gb"] > 0
        assert row["of_large"] > 0


def test_front() -> None:
    found = figures(
        "front.py",
        "--requests",
        "4",
        "--rounds",
        "2",
        "--clients",
        "2",
        "--tokens",
        "2",
        "6",
        "--kinds",
        "completion",
    )
    assert found["requests"] == 8
    assert "stand-in" in found["upstream"]
    assert [row["tokens"] for row in found["rows"]] == [2, 6]
    assert [line["kind"] for line in found["split"]] == ["completion"]
    assert all(row["cpu_ms"] > 0 for row in found["rows"])
