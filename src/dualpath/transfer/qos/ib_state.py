"""What ``smpquery`` and ``perfquery`` (infiniband-diags) show of a port."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dualpath.fabric import NUM_SERVICE_LEVELS

_FIELD: Final = re.compile(r"^(\w+):\.*(.*)$", re.MULTILINE)
_COUNTER_UNIT_BYTES: Final = 4
"""Data counters of a port count 32-bit words (IBA 16.1.3.5)."""


@dataclass(frozen=True, slots=True)
class PortState:
    """Arbitration of one port.

    Attributes:
        lanes: virtual lanes in operation, VL15 not counted.
        high_limit: in units of 4 KiB.
        sl2vl: lane of each service level.
        high, low: weight of each lane in the arbitration tables; lanes without weight are left out.
    """

    lanes: int
    high_limit: int
    sl2vl: tuple[int, ...]
    high: dict[int, int]
    low: dict[int, int]


def parse_port(portinfo: str, sl2vl: str, vlarb: str) -> PortState:
    """State from ``smpquery portinfo``, ``smpquery sl2vl`` and ``smpquery vlarb``.

    Raises:
        ValueError: one of the texts lacks what it should have.
    """
    fields = dict(_FIELD.findall(portinfo))
    lanes = re.fullmatch(r"VL0(?:-([0-9]+))?", fields.get("OperVLs", ""))
    if lanes is None or not fields.get("VLHighLimit", "").isdecimal():
        raise ValueError("smpquery portinfo shows no OperVLs or VLHighLimit")
    tables = _arbitration(vlarb)
    return PortState(
        lanes=int(lanes[1] or 0) + 1,
        high_limit=int(fields["VLHighLimit"]),
        sl2vl=_sl2vl(sl2vl),
        high=tables.get("High", {}),
        low=tables.get("Low", {}),
    )


def parse_sent_bytes(text: str) -> dict[int, int]:
    """Bytes sent on each service level, from ``perfquery --xmtsl``.

    Raises:
        ValueError: there are no such counters in it.
    """
    counted = {
        int(name.removeprefix("XmtDataSL")): int(value) * _COUNTER_UNIT_BYTES
        for name, value in _FIELD.findall(text)
        if re.fullmatch(r"XmtDataSL[0-9]+", name) and value.isdecimal()
    }
    if not counted:
        raise ValueError("perfquery shows no counters by service level")
    return counted


def _sl2vl(text: str) -> tuple[int, ...]:
    """The first line that maps: an adapter has one, a switch's ports may differ."""
    row = re.search(r"^ports: in +[0-9]+, out +[0-9]+: \|(.*)\|\s*$", text, re.MULTILINE)
    cells = [cell.strip() for cell in row[1].split("|")] if row else []
    if len(cells) != NUM_SERVICE_LEVELS or not all(cell.isdecimal() for cell in cells):
        raise ValueError("smpquery sl2vl shows no table of 16 service levels")
    return tuple(int(cell) for cell in cells)


def _arbitration(text: str) -> dict[str, dict[int, int]]:
    tables: dict[str, dict[int, int]] = {}
    blocks = re.split(r"^# (High|Low) priority VL Arbitration Table:", text, flags=re.MULTILINE)
    for name, block in zip(blocks[1::2], blocks[2::2], strict=True):
        # A table of more than 32 entries comes in two parts.
        lanes = [int(cell, 16) for row in _rows("VL", block) for cell in row]
        weights = [int(cell, 16) for row in _rows("WEIGHT", block) for cell in row]
        if len(lanes) != len(weights):
            raise ValueError("smpquery vlarb shows lanes and weights of different number")
        table: dict[int, int] = {}
        for lane, weight in zip(lanes, weights, strict=True):
            if weight:
                table[lane] = table.get(lane, 0) + weight
        tables[name] = table
    return tables


def _rows(head: str, block: str) -> list[list[str]]:
    found = re.findall(rf"^{head}\s*:\s*\|(.*)\|\s*$", block, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in found]
