"""What ``mlnx_qos`` and ``ethtool`` show of an interface."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dualpath.fabric import NUM_PRIORITIES

_CLASS: Final = re.compile(r"^tc: ([0-7]) .*?tsa: (\w+)(?:, bw: ([0-9]+)%)?")
_PRIORITY: Final = re.compile(r"^\s+priority:\s+([0-7])\s*$")


@dataclass(frozen=True, slots=True)
class InterfaceState:
    """Classes of one interface.

    Attributes:
        trust: ``dscp`` or ``pcp``.
        priority_of_dscp: as far as shown.
        lossless: priorities with PFC.
        class_of_priority: traffic class of each priority shown.
        weights: percent guaranteed to each traffic class that is weighted.
    """

    trust: str
    priority_of_dscp: dict[int, int]
    lossless: frozenset[int]
    class_of_priority: dict[int, int]
    weights: dict[int, int]


def parse_interface(text: str) -> InterfaceState:
    """State from ``mlnx_qos -i INTERFACE``.

    Raises:
        ValueError: it does not say what is trusted, or has no PFC line.
    """
    trust = re.search(r"^Priority trust state: (\w+)", text, re.MULTILINE)
    pfc = re.search(r"^\s+enabled((?:\s+[01]){8})\s*$", text, re.MULTILINE)
    if trust is None or pfc is None:
        raise ValueError("mlnx_qos shows no trust state or no PFC configuration")
    dscps: dict[int, int] = {}
    for priority, listed in re.findall(r"^\s*prio:([0-7]) dscp:([0-9,]+)", text, re.MULTILINE):
        dscps |= {int(dscp): int(priority) for dscp in listed.split(",") if dscp}
    classes, weights = _classes(text)
    enabled = pfc[1].split()
    return InterfaceState(
        trust=trust[1],
        priority_of_dscp=dscps,
        lossless=frozenset(p for p in range(NUM_PRIORITIES) if enabled[p] == "1"),
        class_of_priority=classes,
        weights=weights,
    )


def _classes(text: str) -> tuple[dict[int, int], dict[int, int]]:
    classes: dict[int, int] = {}
    weights: dict[int, int] = {}
    current: int | None = None
    for line in text.splitlines():
        if head := _CLASS.match(line):
            current = int(head[1])
            if head[2] == "ets":
                weights[current] = int(head[3] or 0)
        elif current is not None and (member := _PRIORITY.match(line)):
            classes[int(member[1])] = current
    return classes, weights


def parse_sent_bytes(text: str) -> dict[int, int]:
    """Bytes sent with each priority, from ``ethtool -S INTERFACE`` (mlx5's counters).

    Raises:
        ValueError: the driver has no such counters.
    """
    found = re.findall(r"^\s*tx_prio([0-7])_bytes: ([0-9]+)\s*$", text, re.MULTILINE)
    if not found:
        raise ValueError("ethtool shows no counters by priority")
    return {int(priority): int(sent) for priority, sent in found}


def parse_global_class(text: str) -> int | None:
    """The traffic class byte that a device gives all packets, from its ``tc/PORT/traffic_class``;
    None without one."""
    match = re.search(r"Global tclass=([0-9]+)", text)
    return int(match[1]) if match else None
