"""Of what kind the file system below a directory is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_OF_ONE_MACHINE: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs"}
)
_MOUNTS: Final = Path("/proc/self/mountinfo")


def is_of_one_machine(path: Path) -> bool:
    """Whether only this machine uses the file system of ``path``, so that a file lock costs
    microseconds; False when that is not known."""
    kind = kind_of(path)
    return kind in _OF_ONE_MACHINE


def kind_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """Name of the file system, as the kernel calls it; empty when it cannot be told."""
    try:
        target = path.resolve()
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = Path(_plain(fields[4]))
        # Of several mounts on one point the last one is seen.
        if len(point.parts) >= best and target.is_relative_to(point):
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


def _plain(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as octal numbers."""
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, plain)
    return text
