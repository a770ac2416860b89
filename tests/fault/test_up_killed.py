"""However ``dualpath up`` ends, no process of the real engines outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath.engine import models

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

START_S = 300.0
GONE_S = 30.0


def parents() -> dict[int, int]:
    """Parent of every process that is alive (a zombie is not)."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = (folder / "stat").read_text()
                fields = text[text.rindex(")") + 2 :].split()
                if fields[0] not in "ZX":
                    found[int(folder.name)] = int(fields[1])
    return found


def descendants(root: int) -> set[int]:
    tree = parents()
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, parent in tree.items() if parent in new} - found
        found |= new
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for_engine_cores(up: subprocess.Popen[bytes], log: Path) -> set[int]:
    """Both engines' inner processes exist: vLLM starts them itself, they know nothing of us."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        family = descendants(up.pid)
        if sum("EngineCore" in title(pid) for pid in family) == 2:
            return family
        assert up.poll() is None, log.read_text()
        time.sleep(0.2)
    pytest.fail(f"no engine cores within {START_S:g} s:\n{log.read_text()}")


def still_there(family: set[int], within_s: float) -> set[int]:
    end = time.monotonic() + within_s
    while left := family & set(parents()):
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return set()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    models.ensure(models.BundledModel.TINY)
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dualpath.cli.main", "up", "--model", "tiny"),
                *("--port", "0", "--run-dir", "run", "--store", "store"),
            ],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    family: set[int] = set()
    try:
        yield process
        family = descendants(process.pid)
    finally:
        process.kill()
        process.wait(30)
        for pid in still_there(family, 5.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_kill_9_leaves_nothing(up: subprocess.Popen[bytes], tmp_path: Path) -> None:
    family = wait_for_engine_cores(up, tmp_path / "up.log")
    up.kill()
    up.wait(30)
    left = still_there(family, GONE_S)
    assert not left, [title(pid) for pid in left]


def test_ctrl_c_while_starting_ends_all_in_order(
    up: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    family = wait_for_engine_cores(up, tmp_path / "up.log")
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0, (tmp_path / "up.log").read_text()
    # In order: when it has ended, so has everything.
    assert not still_there(family, 0.0)
    assert "stopping" in (tmp_path / "up.log").read_text()
