"""What rendering makes, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """A file to be written.

    Attributes:
        name: without a folder.
        text: its whole content.
        executable: whether it is a script.
    """

    name: str
    text: str
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """Configuration for one fabric.

    Attributes:
        files: in the order in which they are used.
        warnings: what will work, but not as one would wish.
    """

    files: tuple[File, ...]
    warnings: tuple[str, ...] = ()
