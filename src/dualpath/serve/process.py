"""Proof that a process on this machine is dead.

A broken connection alone proves nothing: the process may live and still be writing into another
engine's memory. On the same machine the kernel can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dualpath.control import host


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, not merely its number: numbers are used again."""

    pid: int
    start_ticks: int


def identify(host_id: str, pid: int) -> ProcessId | None:
    """The process, when it can be watched from here; None on another machine or in another
    process namespace."""
    if host_id != host.host_id():
        return None
    found = _stat(pid)
    return None if found is None else ProcessId(pid, found[1])


def is_dead(process: ProcessId) -> bool:
    """Whether the process has ended (a zombie has: its threads and descriptors are gone)."""
    found = _stat(process.pid)
    if found is None:
        return True
    state, start_ticks = found
    return start_ticks != process.start_ticks or state in "ZX"


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold spaces and brackets
    return fields[0], int(fields[19])
