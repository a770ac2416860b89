"""One line of a diagnosis."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, slower or less surely than it could; or it cannot be told."""
    FAIL = "fail"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at, one word or two.
        text: what was found.
        todo: what to change; empty when nothing.
    """

    check: str
    level: Level
    text: str
    todo: str = ""


def ok(check: str, text: str) -> Finding:
    """Nothing to change."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, todo: str = "") -> Finding:
    """Works, but."""
    return Finding(check, Level.WARN, text, todo)


def fail(check: str, text: str, todo: str) -> Finding:
    """Will not work."""
    return Finding(check, Level.FAIL, text, todo)
