"""This machine's RDMA ports, from sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dualpath.config import NodeConfig
from dualpath.transfer.qos.system import entries, read

INFINIBAND = "InfiniBand"
ETHERNET = "Ethernet"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port.

    Attributes:
        device: RDMA device, ``mlx5_0``.
        number: from 1.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        lid: address in the subnet; 0 without one.
        interfaces: network interfaces of the device.
    """

    device: str
    number: int
    link_layer: str
    lid: int
    interfaces: tuple[str, ...]

    @property
    def name(self) -> str:
        """As UCX writes it."""
        return f"{self.device}:{self.number}"


def find_ports(sysfs: Path, node: NodeConfig, link_layer: str) -> list[RdmaPort]:
    """Ports of one kind that ``node`` uses: that of its ``cnic.device``, or all."""
    wanted, _, number = node.cnic.device.partition(":")
    found = []
    for device in entries(sysfs / "class" / "infiniband"):
        interfaces = tuple(entry.name for entry in entries(device / "device" / "net"))
        if wanted and wanted != device.name and wanted not in interfaces:
            continue
        for port in entries(device / "ports"):
            if read(port / "link_layer") != link_layer or (number and number != port.name):
                continue
            lid = read(port / "lid") or "0"
            found.append(RdmaPort(device.name, int(port.name), link_layer, int(lid, 0), interfaces))
    return found
