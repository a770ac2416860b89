"""Removes whatever of a lab is there, by names alone. Uses nothing but the standard library and
what does: it also runs in the keeper, which stays beside every lab."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Final

from dualpath.lab import names
from dualpath.lab.inside import NETNS_DIR, is_inside, processes, send, stat_fields
from dualpath.transfer.qos.system import ThisMachine, ToolFailed

_KILL_S: Final = 20.0
_STEP_S: Final = 0.05
_MACHINE: Final = ThisMachine()


class NotRemoved(RuntimeError):
    """Something of the lab is still there; the text says what."""


def remove_all() -> list[str]:
    """Kill what runs inside the lab's hosts, then remove mounts, hosts, cables and files.

    Returns:
        What was there, in words; empty when nothing was.

    Raises:
        NotRemoved: something is left.
    """
    removed = _kill()
    try:
        removed += _unmount()
        removed += _remove_namespaces()
    except ToolFailed as error:
        raise NotRemoved(str(error)) from None
    if _device().exists():
        # It goes with the front's namespace, though a moment later.
        with contextlib.suppress(ToolFailed):
            _MACHINE.run(["ip", "link", "del", names.MANAGEMENT_DEVICE])
    for folder in (names.RUN_DIR, names.BRICK_DIR):
        if folder.exists():
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise NotRemoved(str(error)) from None
            removed.append(str(folder))
    if left := leftovers():
        raise NotRemoved(f"still there: {', '.join(left)}")
    return removed


def leftovers() -> list[str]:
    """What of a lab is there now."""
    found = [f"namespace {name}" for name in _namespaces()]
    found += [f"mount {path}" for path in _mounts()]
    if _device().exists():
        found.append(f"device {names.MANAGEMENT_DEVICE}")
    found += [str(folder) for folder in (names.RUN_DIR, names.BRICK_DIR) if folder.exists()]
    return found


def _device() -> Path:
    return _MACHINE.sysfs / "class" / "net" / names.MANAGEMENT_DEVICE


def _kill() -> list[str]:
    deadline_s = time.monotonic() + _KILL_S
    killed: set[int] = set()
    while found := [
        (pid, name) for name in _namespaces() for pid in processes(name) if not has_ended(pid)
    ]:
        for pid, name in found:
            if send(pid, signal.SIGKILL, partial(is_inside, pid, name)):
                killed.add(pid)
        if time.monotonic() >= deadline_s:
            pids = ", ".join(str(pid) for pid, _ in found)
            raise NotRemoved(f"processes {pids} were killed and are still there")
        time.sleep(_STEP_S)
    return [f"{len(killed)} processes"] if killed else []


def has_ended(pid: int) -> bool:
    """Whether it is a zombie, which only its parent can remove, or gone."""
    fields = stat_fields(pid)
    return fields is None or fields[0] in "ZX"


def _unmount() -> list[str]:
    removed = []
    # Innermost first. A mount whose server is dead cannot be unmounted any more, only taken out.
    for path in sorted(_mounts(), reverse=True):
        try:
            _MACHINE.run(["umount", "--lazy", path])
        except ToolFailed:
            # A client that was killed may have taken its mount along since we looked.
            if path in _mounts():
                raise
        removed.append(f"mount {path}")
    return removed


def _mounts() -> list[str]:
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        path = Path(line.split()[1])
        if path == names.RUN_DIR or names.RUN_DIR in path.parents:
            found.append(str(path))
    return found


def _namespaces() -> list[str]:
    try:
        entries = sorted(path.name for path in NETNS_DIR.iterdir())
    except FileNotFoundError:
        return []
    return [name for name in entries if name.startswith(f"{names.PREFIX}-")]


def _remove_namespaces() -> list[str]:
    removed = []
    for name in _namespaces():
        _MACHINE.run(["ip", "netns", "del", name])
        removed.append(f"namespace {name}")
    return removed
