"""Children are started, restarted and stopped, and nothing outlives its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dualpath.serve.supervise import (
    ChildSpec,
    ChildState,
    RestartPolicy,
    StartFailed,
    Supervisor,
    log_tail,
)

pytestmark = pytest.mark.integration

WAIT_S = 20.0
QUICK = RestartPolicy(first_s=0.05, most_s=0.2, healthy_s=60.0, start_s=10.0, drain_s=2.0)

# Writes its pid and its grandchild's (in a session of its own), then waits.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; "
     "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session="--session" in sys.argv)
print("hello from", os.getpid(), flush=True)
(folder / "new").write_text(f"{os.getpid()} {grandchild.pid}")
(folder / "new").rename(folder / "pids")
time.sleep(600)
"""


def spec(folder: Path, *flags: str, name: str = "child") -> ChildSpec:
    async def is_ready() -> bool:
        return (folder / "pids").exists()

    return ChildSpec(
        name=name,
        argv=(sys.executable, "-c", FAMILY, str(folder), *flags),
        log=folder / f"{name}.log",
        is_ready=is_ready,
    )


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie has nothing left but its entry."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text[text.rindex(")") + 2] not in "ZX"


def wait_for(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


async def eventually(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Kill what a failing test leaves, so that it cannot disturb others."""
    try:
        yield
    finally:
        if (folder / "pids").exists():
            for pid in pids(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def running(*specs: ChildSpec) -> AsyncIterator[Supervisor]:
    async with Supervisor(specs, QUICK) as supervisor:
        await supervisor.start()
        yield supervisor


async def test_start_and_stop_leave_no_process(tmp_path: Path) -> None:
    with nothing_left(tmp_path):
        async with running(spec(tmp_path)) as supervisor:
            assert supervisor.states() == {"child": ChildState.READY}
            family = pids(tmp_path)
            assert all(alive(pid) for pid in family)
        assert supervisor.states() == {"child": ChildState.STOPPED}
        assert not any(alive(pid) for pid in family)
        assert log_tail(tmp_path / "child.log") == [f"hello from {family[0]}"]


async def test_a_child_that_ignores_sigterm_and_a_grandchild_elsewhere_end_too(
    tmp_path: Path,
) -> None:
    with nothing_left(tmp_path):
        async with running(spec(tmp_path, "--deaf", "--session")):
            family = pids(tmp_path)
        assert not any(alive(pid) for pid in family)


async def test_a_restart_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 0
    begin = asyncio.create_subprocess_exec

    async def refuse_twice(*argv: str, **keys: object) -> object:
        nonlocal refusals
        if refusals < 2:
            refusals += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await begin(*argv, **keys)  # type: ignore[arg-type]

    with nothing_left(tmp_path):
        async with running(spec(tmp_path)) as supervisor:
            first = pids(tmp_path)
            (tmp_path / "pids").unlink()
            monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_twice)
            os.kill(first[0], signal.SIGKILL)
            await eventually((tmp_path / "pids").exists, "a start after two refusals")
            assert refusals == 2
            assert supervisor.restarts() == {"child": 3}
            family = pids(tmp_path)
        assert not any(alive(pid) for pid in family)


async def test_a_killed_child_is_started_again_without_its_old_family(tmp_path: Path) -> None:
    with nothing_left(tmp_path):
        async with running(spec(tmp_path)) as supervisor:
            first = pids(tmp_path)
            (tmp_path / "pids").unlink()
            os.kill(first[0], signal.SIGKILL)
            await eventually((tmp_path / "pids").exists, "a second start")
            await eventually(
                lambda: supervisor.states()["child"] is ChildState.READY, "ready again"
            )
            second = pids(tmp_path)
            assert not any(alive(pid) for pid in first)
            assert all(alive(pid) for pid in second)
            assert supervisor.restarts() == {"child": 1}
        assert not any(alive(pid) for pid in second)
    text = (tmp_path / "child.log").read_text()
    assert f"hello from {first[0]}" in text
    assert f"hello from {second[0]}" in text


async def test_pauses_grow_and_are_bounded(tmp_path: Path) -> None:
    """A child that ends right after its first start is tried again with doubled pauses."""
    changes: list[str] = []

    async def at_once() -> bool:
        return True

    program = (
        "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); time.sleep(0.2); sys.exit(3)"
    )
    child = ChildSpec(
        "c", (sys.executable, "-c", program, str(tmp_path)), tmp_path / "log", at_once
    )
    policy = RestartPolicy(first_s=0.01, most_s=0.04, healthy_s=60.0, start_s=5.0, drain_s=1.0)

    def listen(name: str, state: ChildState, detail: str) -> None:
        if state is ChildState.BACKING_OFF:
            changes.append(detail)

    async with Supervisor([child], policy, listen) as supervisor:
        await supervisor.start()
        await eventually(lambda: len(changes) >= 4, "four ends")
    assert changes[:4] == [
        f"ended with status 3; restart in {pause} s" for pause in ("0.01", "0.02", "0.04", "0.04")
    ]


async def test_a_first_start_that_fails_says_why(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    program = "import sys; print('the model is missing'); sys.exit(7)"
    bad = ChildSpec("pe0", (sys.executable, "-c", program), tmp_path / "pe0.log", never)
    async with Supervisor([bad], QUICK) as supervisor:
        with pytest.raises(StartFailed) as failure:
            await supervisor.start()
    lines = str(failure.value).splitlines()
    assert lines[0] == f"pe0: ended with status 7; the end of {tmp_path / 'pe0.log'}:"
    assert lines[1:] == ["  the model is missing"]


async def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    bad = ChildSpec("pe0", (str(tmp_path / "none"),), tmp_path / "pe0.log", never)
    async with Supervisor([bad], QUICK) as supervisor:
        with pytest.raises(StartFailed, match="cannot be started: No such file"):
            await supervisor.start()


async def test_one_bad_child_ends_the_start_of_all(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    bad = ChildSpec("bad", (sys.executable, "-c", "raise SystemExit(1)"), tmp_path / "b", never)
    with nothing_left(tmp_path):
        async with Supervisor([spec(tmp_path), bad], QUICK) as supervisor:
            with pytest.raises(StartFailed, match="bad: ended with status 1"):
                await supervisor.start()
        assert set(supervisor.states().values()) == {ChildState.STOPPED}
        if (tmp_path / "pids").exists():
            assert not any(alive(pid) for pid in pids(tmp_path))


async def test_a_child_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    slow = ChildSpec("slow", (sys.executable, "-c", FAMILY, str(tmp_path)), tmp_path / "l", never)
    policy = RestartPolicy(start_s=1.0, drain_s=1.0)
    with nothing_left(tmp_path):
        async with Supervisor([slow], policy) as supervisor:
            with pytest.raises(StartFailed, match="was not ready within 1 s"):
                await supervisor.start()
        if (tmp_path / "pids").exists():
            assert not any(alive(pid) for pid in pids(tmp_path))


async def test_a_killed_warden_takes_its_program_along(tmp_path: Path) -> None:
    with nothing_left(tmp_path):
        async with running(spec(tmp_path)) as supervisor:
            first = pids(tmp_path)
            (tmp_path / "pids").unlink()
            os.kill(os.getpgid(first[0]), signal.SIGKILL)
            await eventually((tmp_path / "pids").exists, "a second start")
            await eventually(lambda: not any(alive(pid) for pid in first), "the first family's end")
            assert supervisor.restarts() == {"child": 1}


PARENT = """
import asyncio, pathlib, sys
sys.path.insert(0, sys.argv[2])
from test_supervise import QUICK, spec
from dualpath.serve.supervise import Supervisor
async def main():
    folder = pathlib.Path(sys.argv[1])
    async with Supervisor([spec(folder, *sys.argv[3:])], QUICK) as supervisor:
        await supervisor.start()
        (folder / "up").touch()
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("flags", [(), ("--deaf",), ("--session",)])
def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with nothing_left(tmp_path):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path), str(Path(__file__).parent), *flags]
        )
        try:
            wait_for((tmp_path / "up").exists, "the family's start")
            family = pids(tmp_path)
            assert all(alive(pid) for pid in family)
        finally:
            parent.kill()
            parent.wait(timeout=WAIT_S)
        wait_for(lambda: not any(alive(pid) for pid in family), "the family's end")
