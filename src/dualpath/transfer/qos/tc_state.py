"""What ``tc`` shows, and which class it would give a packet.

Classes and filters are read from tc's text: iproute2 has no JSON for htb classes before 6.11, and
its JSON of a u32 filter names every match ``match``, so that all but one are lost.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from typing import Final

_RATE_UNITS: Final = {
    "bit": 1, "Kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12,
    "Kibit": 2**10, "Mibit": 2**20, "Gibit": 2**30,
}  # fmt: skip
_CLASS: Final = re.compile(
    r"^class htb (?P<id>\S+) (?:root|parent (?P<parent>\S+))(?: leaf \S+)?"
    r"(?: prio (?P<prio>\d+))?.*? rate (?P<rate>\S+) ceil (?P<ceil>\S+)"
)
_SENT: Final = re.compile(r"^\s*Sent (\d+) bytes (\d+) pkt")
_FILTER: Final = re.compile(
    r"^filter (?:parent \S+ )?protocol (?P<protocol>\S+) pref (?P<pref>\d+) u32 .*?"
    r"fh (?P<handle>\S+) order (?P<order>\d+) .*?flowid (?P<flowid>\S+)"
)
_MATCH: Final = re.compile(r"^\s+match ([0-9a-f]{8})/([0-9a-f]{8}) at (nexthdr\+)?(-?\d+)")
_HEADER_BYTES: Final = {4: 20, 6: 40}
"""By IP version, without options or extension headers."""
_PROTOCOLS: Final = {4: ("ip", "all"), 6: ("ipv6", "all")}
_TCP: Final = 6


@dataclass(frozen=True, slots=True)
class HtbClass:
    """One class.

    Attributes:
        parent: class above it; empty at the root.
        prio: lower goes first.
        sent_bytes, sent_packets: since it was made, as packets are on the wire.
    """

    class_id: str
    parent: str
    prio: int
    rate_bits_s: float
    ceil_bits_s: float
    sent_bytes: int
    sent_packets: int


@dataclass(frozen=True, slots=True)
class U32Filter:
    """One rule: all ``keys`` (value, mask, offset, whether from the transport header) must match
    the 32-bit word at their offset."""

    protocol: str
    pref: int
    order: int
    flow_id: str
    keys: tuple[tuple[int, int, int, bool], ...]

    def matches(self, header: bytes) -> bool:
        """Whether it takes a packet of ``ipv4_header`` or ``ipv6_header``."""
        version = header[0] >> 4
        if self.protocol not in _PROTOCOLS[version]:
            return False
        for value, mask, offset, after_ip in self.keys:
            start = offset + (_HEADER_BYTES[version] if after_ip else 0)
            if start < 0 or start + 4 > len(header):
                return False
            if int.from_bytes(header[start : start + 4], "big") & mask != value:
                return False
        return True


def parse_rate(text: str) -> float:
    """Bits a second from tc's ``198Mbit``.

    Raises:
        ValueError: not such a text.
    """
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]+)", text)
    if match is None or match[2] not in _RATE_UNITS:
        raise ValueError(f"tc's rate {text!r} is not understood")
    return float(match[1]) * _RATE_UNITS[match[2]]


def parse_classes(text: str) -> dict[str, HtbClass]:
    """Classes by id, from ``tc -s class show``."""
    found: dict[str, HtbClass] = {}
    head: re.Match[str] | None = None
    for line in text.splitlines():
        if line.startswith("class "):
            head = _CLASS.match(line)
            sent = packets = 0
        elif head is not None and (counted := _SENT.match(line)):
            sent, packets = int(counted[1]), int(counted[2])
        else:
            continue
        if head is not None:
            found[head["id"]] = HtbClass(
                head["id"], head["parent"] or "", int(head["prio"] or 0),
                parse_rate(head["rate"]), parse_rate(head["ceil"]), sent, packets,
            )  # fmt: skip
    return found


def parse_filters(text: str) -> list[U32Filter]:
    """u32 rules in the order in which the kernel tries them, from ``tc filter show``."""
    found: list[U32Filter] = []
    head: re.Match[str] | None = None
    keys: list[tuple[int, int, int, bool]] = []

    def keep() -> None:
        if head is not None:
            pref, order = int(head["pref"]), int(head["order"])
            found.append(U32Filter(head["protocol"], pref, order, head["flowid"], tuple(keys)))

    for line in text.splitlines():
        if line.startswith("filter "):
            keep()
            head, keys = _FILTER.match(line), []
        elif key := _MATCH.match(line):
            keys.append((int(key[1], 16), int(key[2], 16), int(key[4]), bool(key[3])))
    keep()
    return sorted(found, key=lambda rule: (rule.pref, rule.order))


def ipv4_header(source_port: int, target_port: int, traffic_class: int = 0) -> bytes:
    """Headers of a TCP packet: IPv4 without options, and the beginning of TCP's."""
    ip = struct.pack("!BBHHHBBHII", 0x45, traffic_class, 40, 0, 0x4000, 64, _TCP, 0, 0, 0)
    return ip + _tcp_header(source_port, target_port)


def ipv6_header(source_port: int, target_port: int, traffic_class: int = 0) -> bytes:
    """The same over IPv6 without extension headers."""
    ip = struct.pack("!IHBB", 6 << 28 | traffic_class << 20, 20, _TCP, 64) + bytes(32)
    return ip + _tcp_header(source_port, target_port)


def _tcp_header(source_port: int, target_port: int) -> bytes:
    return struct.pack("!HH", source_port, target_port) + bytes(16)


def parse_default(text: str) -> str | None:
    """Full id of htb's default class, from ``tc -j qdisc show``; None without htb at the root."""
    for qdisc in json.loads(text or "[]"):
        if qdisc.get("root") and qdisc.get("kind") == "htb":
            minor = int(str(qdisc.get("options", {}).get("default", "0")), 16)
            return f"{qdisc['handle']}{minor:x}"
    return None


@dataclass(frozen=True, slots=True)
class TcState:
    """htb as it is on one interface.

    Attributes:
        default: class of packets that no rule takes.
        classes: by id.
        filters: in the order in which they are tried.
    """

    default: str
    classes: dict[str, HtbClass]
    filters: list[U32Filter]

    def classify(self, header: bytes) -> str:
        """Class of a packet: that of the first rule which takes it, or the default one."""
        for rule in self.filters:
            if rule.matches(header):
                return rule.flow_id
        return self.default
