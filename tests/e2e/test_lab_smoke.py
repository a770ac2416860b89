"""The lab's short experiment as a user runs it: real engines on hosts with real NIC limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dualpath.config import ConfigError
from dualpath.lab.network import check_machine

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(900)]

LEAST_SPEEDUP = 1.6
"""Of 2.0 that two storage NICs can give in place of one."""


def dualpath(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dualpath.cli.main", *argv],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def machine() -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))


def test_reading_through_both_sides_pays(tmp_path: Path) -> None:
    out = tmp_path / "smoke"
    line = json.loads(dualpath("lab", "run", "smoke", "--out", str(out), "--json").splitlines()[-1])

    assert line["tokens_equal"], line["first_difference"]
    (case,) = line["cases"]
    assert case["hit_ratio"] > 0.9
    alone, both = (case["variants"][mode]["run"] for mode in ("pe-only", "dualpath"))
    # The kernel's counters: only one storage NIC carries KV without the second path, both with it.
    assert share(alone, "de0") < 0.05
    assert 0.35 < share(both, "de0") < 0.65
    for mode in ("pe-only", "dualpath"):
        figures = line[mode]
        assert figures["failed"] == 0 and figures["agents_done"] == case["agents"]
        assert sum(figures["path"][side] for side in ("pe", "de")) > 0
    assert case["speedup"]["dualpath"] >= LEAST_SPEEDUP, case

    dualpath("report", str(out))
    assert (out / "report.html").stat().st_size > 10_000
    assert (
        "dualpath-"
        not in subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    )


def share(run: dict[str, Any], node: str) -> float:
    """A node's part of all bytes that storage NICs received."""
    received = {name: nic["snic_rx_bytes"] for name, nic in run["nics"].items()}
    return received[node] / sum(received.values())
