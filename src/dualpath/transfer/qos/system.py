"""What a check looks at: this machine's tools and sysfs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_TOOL_S: Final = 15.0


class ToolMissing(Exception):
    """A program is not installed."""


class ToolFailed(Exception):
    """A program refused or did not answer; the text is the first line of what it said."""


class System(Protocol):
    """A machine to be checked. Called by one thread."""

    @property
    def sysfs(self) -> Path:
        """Where the kernel shows its devices."""
        ...

    def run(self, argv: Sequence[str]) -> str:
        """Standard output of a program that changes nothing.

        Raises:
            ToolMissing: it is not installed.
            ToolFailed: it ended with an error or took too long.
        """
        ...


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """The machine this process runs on, in its network namespace."""

    sysfs: Path = Path("/sys")

    def run(self, argv: Sequence[str]) -> str:
        """See ``System.run``."""
        # Interactive shells of other users do not have the folders of administration tools.
        program = shutil.which(argv[0]) or shutil.which(argv[0], path="/usr/sbin:/sbin")
        if program is None:
            raise ToolMissing(f"{argv[0]} is not installed")
        try:
            done = subprocess.run(
                [program, *argv[1:]], capture_output=True, text=True, timeout=_TOOL_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ToolFailed(f"{argv[0]} did not answer within {_TOOL_S:g} s") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise ToolFailed(f"{argv[0]}: {said[0] if said else f'status {done.returncode}'}")
        return done.stdout


def read(path: Path) -> str:
    """A sysfs attribute; empty where this kernel or device has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def entries(folder: Path) -> list[Path]:
    """What lies in a sysfs folder, by name; nothing where there is no such hardware."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
