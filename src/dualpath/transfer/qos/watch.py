"""Watching counters by traffic class for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from dualpath.transfer.qos.system import ToolFailed, ToolMissing
from dualpath.transfer.qos.verdict import Counted

P = TypeVar("P")
C = TypeVar("C")

logger = logging.getLogger(__name__)


def watch(
    places: Iterable[P],
    sent: Callable[[P], Mapping[C, int]],
    where: Callable[[P], str],
    classes: tuple[C, C],
    interval_s: float,
) -> list[Counted]:
    """Bytes of model and KV traffic that go out in ``interval_s``.

    Args:
        places: which may count.
        sent: bytes so far by class, of a place; raises ``ToolMissing``, ``ToolFailed`` or
            ``ValueError`` where they cannot be read. A class that it leaves out has sent none.
        where: a place's name for people.
        classes: of model and of KV traffic.
        interval_s: 0 not to watch.

    Returns:
        One entry a place; none for a place whose counters cannot be read. The report says when
        nothing was counted.
    """
    if interval_s <= 0:
        return []
    # Many adapters and drivers have no counters by class; those that had some must still.
    before = _read(places, sent, where, logging.INFO)
    if not before:
        return []
    started_s = time.monotonic()
    time.sleep(interval_s)
    after = _read(before, sent, where, logging.WARNING)
    seconds = time.monotonic() - started_s
    counted = []
    for place, new in after.items():
        model, kv = (new.get(one, 0) - before[place].get(one, 0) for one in classes)
        counted.append(Counted(where(place), model, kv, seconds))
    return counted


def _read(
    places: Iterable[P],
    sent: Callable[[P], Mapping[C, int]],
    where: Callable[[P], str],
    level: int,
) -> dict[P, Mapping[C, int]]:
    found = {}
    for place in places:
        try:
            found[place] = sent(place)
        except (ToolMissing, ToolFailed, ValueError) as error:
            logger.log(level, "%s: counters by class cannot be read: %s", where(place), error)
    return found
