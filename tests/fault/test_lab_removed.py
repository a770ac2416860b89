"""Nothing of a lab is left, however it ends. Hosts and file system only: engines are stopped by the
supervisor that ``test_up_killed`` is about."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath.config import ConfigError
from dualpath.lab import claim, names
from dualpath.lab.inside import processes
from dualpath.lab.network import check_machine
from dualpath.lab.removing import has_ended, leftovers, remove_all

pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(300)]

WAIT_S = 60.0
PROGRAM = (sys.executable, "-m", "dualpath.cli.main", "lab")


@pytest.fixture(autouse=True)
def machine() -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    assert not claim.is_claimed(), "another lab runs on this machine"


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, leftovers()
        time.sleep(0.05)


def lab(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *argv], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


class Up:
    """``dualpath lab up`` that is ready, and all processes that belong to it."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "up", "--no-engines", "--run-dir", str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        try:
            line = self.process.stdout.readline()  # the test's own limit ends this wait
            assert line.startswith("ready: hosts storage, front, pe0, de0 "), line
        except BaseException:  # whatever it is: the keeper removes what there is
            self.process.kill()
            self.process.wait(WAIT_S)
            raise
        self.keepers = children(self.process.pid)
        self.inside = [
            pid for host in ("storage", "front", "pe0", "de0")
            for pid in processes(names.namespace(host))
        ]  # fmt: skip

    def gone(self) -> bool:
        return not claim.is_claimed() and not leftovers()


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


@contextlib.contextmanager
def up(folder: Path) -> Iterator[Up]:
    running = Up(folder)
    try:
        assert len(leftovers()) >= 5 + 4 + 1, "hosts and the switch, mounts, the cable"
        assert len(running.inside) >= 5, "a server and four clients of the file system"
        assert len(running.keepers) == 1
        yield running
    finally:
        for pid in (running.process.pid, *running.keepers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.wait(WAIT_S)
        until(lambda: not claim.is_claimed())
        remove_all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_process_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path) as running:
        running.process.send_signal(number)
        status = running.process.wait(WAIT_S)
        assert status == (-number if number is signal.SIGKILL else 0)
        until(running.gone)
        until(lambda: all(map(has_ended, running.inside + running.keepers)))
        assert leftovers() == []


def test_down_ends_a_running_lab(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        second = lab("up", "--no-engines", "--run-dir", str(tmp_path / "second"))
        (line,) = second.stderr.splitlines()
        assert second.returncode == 2
        assert f"one runs already, of process {running.process.pid}" in line
        assert running.process.poll() is None and leftovers()
        # Who is signalled: the claim's holder, and nobody who got its number.
        assert claim.holder() == running.process.pid
        assert claim._holds(running.process.pid) and not claim._holds(os.getpid())

        done = lab("down")
        assert done.returncode == 0 and done.stdout.startswith("the lab is down\n"), done.stderr
        assert running.process.wait(WAIT_S) == 0
        assert running.gone()
        again = lab("down")
        assert (again.returncode, again.stdout) == (0, "nothing is left of a lab\n")


def test_what_a_killed_keeper_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        (keeper,) = running.keepers
        os.kill(keeper, signal.SIGKILL)
        running.process.kill()
        running.process.wait(WAIT_S)
        until(lambda: not claim.is_claimed())
        assert len(leftovers()) >= 10
        assert not any(map(has_ended, running.inside)), "nobody was there to end them"

        done = lab("down")
        assert done.returncode == 0 and "removed: " in done.stdout, done.stderr
        assert running.gone()
        until(lambda: all(map(has_ended, running.inside)))


def test_a_host_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    """The storage host's log cannot be written: the hosts are there by then."""
    (tmp_path / "storage").write_text("a file where a folder should be")
    done = lab("up", "--no-engines", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --run-dir: {tmp_path}/storage/")
    assert not claim.is_claimed() and leftovers() == []
