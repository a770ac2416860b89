"""Running things inside a host of the lab: programs, and short pieces of our own code."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from dualpath.lab import names

T = TypeVar("T")

NETNS_DIR: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_CALL_S: Final = 30.0
_BIND: Final = 'mount --bind "$0" "$1" && shift && exec "$@"'


def command(host: str, argv: Sequence[str]) -> list[str]:
    """``argv`` as it runs inside a host: in its network, with its own mount of the store at
    ``names.STORE_DIR``. The program replaces the wrappers, so signals reach it."""
    return [
        *("ip", "netns", "exec", names.namespace(host), "sh", "-c", _BIND),
        *(str(names.RUN_DIR / host), str(names.STORE_DIR), *argv),
    ]


def network_command(host: str, argv: Sequence[str]) -> list[str]:
    """``argv`` in a host's network but with this machine's mounts: what it mounts is seen by
    whatever is started in the host later."""
    return ["nsenter", f"--net={NETNS_DIR / names.namespace(host)}", *argv]


def call(host: str, work: Callable[[], T]) -> T:
    """What ``work`` returns when it runs in a host's network. Sockets that it opens stay there.

    Raises:
        OSError: there is no such host.
        TimeoutError: it takes too long.
        Exception: whatever ``work`` raises.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            _enter(names.namespace(host))
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(error)

    # A thread of its own: the network is one of the thread, and there is no way back for sure.
    thread = threading.Thread(target=run, name=f"in {host}", daemon=True)
    thread.start()
    thread.join(_CALL_S)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"{host}: not done within {_CALL_S:g} s")
    return outcome[0]


def _enter(namespace: str) -> None:
    descriptor = os.open(NETNS_DIR / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def processes(namespace: str) -> list[int]:
    """Processes whose network is that namespace; none when it is gone."""
    try:
        wanted = (NETNS_DIR / namespace).stat()
    except FileNotFoundError:
        return []
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                info = (folder / "ns" / "net").stat()
            except OSError:
                continue  # ended meanwhile
            if (info.st_dev, info.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(folder.name))
    return found


def is_inside(pid: int, namespace: str) -> bool:
    """Whether a process's network is that namespace; not when either is gone."""
    try:
        ours, its = (NETNS_DIR / namespace).stat(), Path(f"/proc/{pid}/ns/net").stat()
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (its.st_dev, its.st_ino)


def send(pid: int, number: signal.Signals, is_meant: Callable[[], bool]) -> bool:
    """Send a signal to a process if, once it is held, it is still the one that is meant: a number
    may have gone to another process since it was looked up.

    Args:
        is_meant: looks at the process again.

    Returns:
        Whether it was sent.
    """
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(held, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(held)
    return True


def stat_fields(pid: int) -> list[str] | None:
    """What ``/proc/PID/stat`` has after the program's name: the state comes first. None when there
    is no such process (any more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None  # ended, perhaps between opening and reading
    return text[text.rindex(")") + 2 :].split()  # the name may hold spaces and brackets


_LIBC = ctypes.CDLL(None, use_errno=True)
