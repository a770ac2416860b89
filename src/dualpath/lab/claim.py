"""One lab a machine: who has it, and waiting for its end.

The claim is a listening socket in the kernel's abstract namespace: it vanishes with the last
process that holds it and leaves no file. The keeper inherits it, so a lab that is still being
removed is still claimed.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import time
from functools import partial
from pathlib import Path
from typing import Final

from dualpath.config import ConfigError
from dualpath.lab import names
from dualpath.lab.inside import send
from dualpath.lab.removing import has_ended

_NAME: Final = f"\0{names.PREFIX}"
_SHOWN_NAME: Final = f"@{names.PREFIX}"
_INODE, _PATH = 6, 7
"""Columns of /proc/net/unix."""
_BACKLOG: Final = 4096
"""Nobody accepts those that ask who has it: they stay in the queue."""
_STEP_S: Final = 0.1
_STOP_S: Final = 90.0
"""Engines and front drain, then the keeper removes."""
_REMOVE_S: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")


class LabStays(RuntimeError):
    """A lab could not be ended in time."""


def claim(within_s: float = 0.0) -> socket.socket:
    """Take the machine's lab; closing the socket gives it back.

    Args:
        within_s: most time to wait for a lab whose process is dead and that is being removed.

    Raises:
        ConfigError: somebody else has it.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(_NAME)
            held.listen(_BACKLOG)
        except OSError:
            held.close()
            pid = holder()
            if time.monotonic() >= deadline_s or (pid is not None and not has_ended(pid)):
                raise ConfigError(
                    f"lab: one runs already, of process {pid}; end it first: dualpath lab down"
                ) from None
            time.sleep(_STEP_S)
        else:
            return held


def holder() -> int | None:
    """The process that claimed the lab, which may be dead while its keeper still removes it; None
    when nobody has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_STEP_S)
        try:
            probe.connect(_NAME)
        except OSError:
            return None
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def is_claimed() -> bool:
    """Whether there is a lab, or one being removed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(_NAME)
        except OSError:
            return True
    return False


def end() -> bool:
    """End the lab that runs: SIGTERM to the process that has it, SIGKILL after a while.

    Returns:
        Whether there was one.

    Raises:
        LabStays: it is still there.
    """
    if not is_claimed():
        return False
    for number, limit_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _REMOVE_S)):
        pid = holder()
        if pid is not None:
            send(pid, number, partial(_holds, pid))
        deadline_s = time.monotonic() + limit_s
        while is_claimed():
            if time.monotonic() >= deadline_s:
                break
            time.sleep(_STEP_S)
        else:
            return True
    raise LabStays(f"the lab of process {pid} is still there after it was killed")


def _holds(pid: int) -> bool:
    """Whether a process has the claim open: one that got the number of a dead one has not."""
    inodes = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if len(fields) > _PATH and fields[_PATH] == _SHOWN_NAME:
            inodes.add(f"socket:[{fields[_INODE]}]")
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False  # ended meanwhile
    for entry in entries:
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()) in inodes:
                return True
    return False
