"""Which processes can watch each other by their numbers."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")


def host_id() -> str:
    """Equal for two processes exactly when they share a kernel and its process numbers.

    Containers on one machine share the kernel, but the same number is another process in each:
    taken for the other's, its end would prove nothing.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    return f"{boot} {_PIDS.readlink()}" if _PIDS.is_symlink() else boot
