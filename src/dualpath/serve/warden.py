"""Runs one program and makes sure that nothing of it outlives its supervisor.

Started as a file with nothing but the standard library (``python -I -S warden.py DRAIN_S PROGRAM
ARG...``), because one runs beside every engine. Standard input is a pipe whose other end only the
supervisor holds: its end of file means that the supervisor is gone, however it went. Exits with the
program's status (128 + n for signal n), after every descendant of the program has ended.

SIGTERM, SIGINT and the end of the pipe ask the program to stop (SIGTERM); after DRAIN_S seconds,
or at a second signal, everything is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_STEP_S = 0.02
_REAP_S = 30.0  # a killed process stuck in the kernel is given up after that, and said
_LIFELINE = 0


def main(arguments: list[str]) -> int:
    """Run to the program's end; see the module's text."""
    drain_s, argv = float(arguments[0]), arguments[1:]
    wake_reader, wake_writer = os.pipe()
    for end in (wake_reader, wake_writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the wake-up pipe tells
    # Orphans of the program come to us instead of to init, so that we can find them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, preexec_fn=functools.partial(_die_with, os.getpid())
        )
    except OSError as error:
        print(f"{argv[0]}: cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    try:
        status = _watch(child, wake_reader, drain_s)
    finally:
        _kill_all()
    return status if status >= 0 else 128 - status


def _watch(child: subprocess.Popen[bytes], wake: int, drain_s: float) -> int:
    """Wait for the program, passing on requests to stop; its return code."""
    waiting = [wake, _LIFELINE]
    stops = 0
    kill_at: float | None = None
    while (status := child.poll()) is None:
        left = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        readable, _, _ = select.select(waiting, [], [], left)
        if wake in readable:
            numbers = os.read(wake, 64)
            stops += sum(number != signal.SIGCHLD for number in numbers)
        if _LIFELINE in readable and not os.read(_LIFELINE, 64):
            waiting.remove(_LIFELINE)
            stops = max(stops, 1)
        if stops and kill_at is None:
            kill_at = time.monotonic() + drain_s
            child.terminate()
        if stops > 1 or (kill_at is not None and time.monotonic() >= kill_at):
            child.kill()
            return child.wait()
    return status


def _kill_all() -> None:
    """Kill and reap what is left. A killed parent's children become ours, so it takes rounds."""
    give_up = time.monotonic() + _REAP_S
    while time.monotonic() < give_up:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(_REAP_STEP_S)
    print(f"killed, but still there: {_children()}", file=sys.stderr, flush=True)


def _children() -> list[int]:
    ours = str(os.getpid())
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = (folder / "stat").read_text()
                if text[text.rindex(")") + 2 :].split()[1] == ours:
                    found.append(int(folder.name))
    return found


def _die_with(parent: int) -> None:
    """In the child, before exec: when we are killed outright, the kernel kills the program."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # killed before the line above
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
