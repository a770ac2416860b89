"""Counters of the lab's hosts that the kernel keeps: bytes of every NIC, CPU time."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from dualpath.lab import inside, names
from dualpath.transfer.qos import tc
from dualpath.transfer.qos.system import ThisMachine
from dualpath.transfer.qos.tc_state import parse_classes

HEADER_BYTES: Final = 66
"""Of a TCP packet: Ethernet 14, IPv4 20, TCP with timestamps 32."""
_LINE: Final = re.compile(r"^\s*([^\s:]+):\s*(.*)$")
_RX_BYTES, _RX_PACKETS, _TX_BYTES, _TX_PACKETS = 0, 1, 8, 9
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class NicBytes:
    """Totals of one device since it was made.

    A packet here is what the kernel hands over at once, up to 64 KiB with one set of headers.
    """

    rx_bytes: int = 0
    rx_packets: int = 0
    tx_bytes: int = 0
    tx_packets: int = 0

    @property
    def rx_payload_bytes(self) -> int:
        """Received, without headers."""
        return self.rx_bytes - HEADER_BYTES * self.rx_packets

    @property
    def tx_payload_bytes(self) -> int:
        """Sent, without headers."""
        return self.tx_bytes - HEADER_BYTES * self.tx_packets

    def since(self, earlier: NicBytes) -> NicBytes:
        """What was added after ``earlier``."""
        return NicBytes(
            self.rx_bytes - earlier.rx_bytes,
            self.rx_packets - earlier.rx_packets,
            self.tx_bytes - earlier.tx_bytes,
            self.tx_packets - earlier.tx_packets,
        )


@dataclass(frozen=True, slots=True)
class ClassBytes:
    """What a traffic class of a host's compute NIC sent, headers of every packet on the wire
    included."""

    bytes: int = 0
    packets: int = 0

    @property
    def payload_bytes(self) -> int:
        """Without headers."""
        return self.bytes - HEADER_BYTES * self.packets

    def since(self, earlier: ClassBytes) -> ClassBytes:
        """What was added after ``earlier``."""
        return ClassBytes(self.bytes - earlier.bytes, self.packets - earlier.packets)


def parse_devices(text: str) -> dict[str, NicBytes]:
    """Devices by name, from ``/proc/net/dev``."""
    found = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            numbers = [int(part) for part in match[2].split()]
            found[match[1]] = NicBytes(
                numbers[_RX_BYTES], numbers[_RX_PACKETS], numbers[_TX_BYTES], numbers[_TX_PACKETS]
            )
    return found


class NicCounters:
    """The NICs of some hosts. Microseconds a look: the kernel's files are kept open.

    Close it before the hosts are removed: an open file keeps a network alive.

    Raises:
        OSError: there is no such host.
    """

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._files = {host: inside.call(host, _open) for host in hosts}

    def read(self) -> dict[str, dict[str, NicBytes]]:
        """By host, then by device."""
        found = {}
        for host, file in self._files.items():
            file.seek(0)
            found[host] = parse_devices(file.read().decode())
        return found

    def close(self) -> None:
        """Let the hosts go."""
        for file in self._files.values():
            file.close()


def _open() -> BinaryIO:
    # /proc/net is the network of the process; ours is the thread's.
    return Path("/proc/thread-self/net/dev").open("rb", buffering=0)


def class_bytes(host: str) -> dict[str, ClassBytes]:
    """What each class of a host's compute NIC has sent, by ``model`` and ``kv``; empty without
    isolation.

    Raises:
        ToolFailed: the host is not there.
    """
    namespace = names.namespace(host)
    argv = ["tc", "-n", namespace, "-s", "class", "show", "dev", names.CNIC]
    classes = parse_classes(ThisMachine().run(argv))
    if tc.KV_CLASS not in classes:
        return {}
    return {
        name: ClassBytes(classes[one].sent_bytes, classes[one].sent_packets)
        for name, one in (("model", tc.MODEL_CLASS), ("kv", tc.KV_CLASS))
    }


def cpu_s(host: str) -> float:
    """CPU time of the processes that are in a host now: its engine or front, and its part of the
    file system."""
    total = 0
    for pid in inside.processes(names.namespace(host)):
        if (fields := inside.stat_fields(pid)) is not None:  # else ended meanwhile
            total += int(fields[11]) + int(fields[12])
    return total * _TICK_S
