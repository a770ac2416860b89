"""What a check found out."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Verdict(enum.Enum):
    """Whether classes are in force."""

    IN_FORCE = "in force"
    NOT_IN_FORCE = "not in force"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        where: node and interface or port.
        what: what was looked at.
        text: what was found.
        todo: what to change; empty when nothing.
    """

    where: str
    what: str
    verdict: Verdict
    text: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes that left through one interface or port while it was watched.

    Attributes:
        where: as in ``Check``.
        model_bytes, kv_bytes: by class.
        seconds: how long.
    """

    where: str
    model_bytes: int
    kv_bytes: int
    seconds: float


def overall(checks: Iterable[Check]) -> Verdict:
    """In force only if everything looked at is, and something was."""
    verdicts = {check.verdict for check in checks}
    if Verdict.NOT_IN_FORCE in verdicts:
        return Verdict.NOT_IN_FORCE
    return Verdict.IN_FORCE if verdicts == {Verdict.IN_FORCE} else Verdict.UNKNOWN
