"""GPUs and RDMA NICs as the kernel shows them under sysfs, and which pairs share a PCIe switch.

A device's real path names every bridge above it: root complex, root port, then the ports of
switches. Two devices that have a bridge below the root port in common are under one switch.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DISPLAY_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and display controllers, processing accelerators."""
_GPU_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT_COMPLEX: Final = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Distance(enum.IntEnum):
    """How far two devices are apart; the smaller the better."""

    SWITCH = 0
    """Under one PCIe switch: bytes between them do not touch the CPU."""
    ROOT = 1
    """Under one root complex, through the CPU."""
    FAR = 2
    """Under different root complexes."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or a NIC.

    Attributes:
        name: what people call it: PCI address of a GPU, ``mlx5_0`` of a NIC.
        bridges: root complex, root port and switch ports above it, from the top.
        numa_node: -1 when the kernel does not say.
    """

    name: str
    bridges: tuple[str, ...]
    numa_node: int


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA NIC."""

    nic: str
    number: str
    link_layer: str
    state: str
    rate: str


def find_gpus(sysfs: Path) -> list[Device]:
    """GPUs by PCI address."""
    found = []
    for entry in _entries(sysfs / "bus" / "pci" / "devices"):
        kind, vendor = _text(entry / "class"), _text(entry / "vendor")
        if kind.startswith(_DISPLAY_CLASSES) and vendor in _GPU_VENDORS:
            found.append(_device(entry.name, entry))
    return found


def find_nics(sysfs: Path) -> list[Device]:
    """RDMA NICs by name. Virtual ones, which lie under no PCI device, are left out."""
    found = []
    for entry in _entries(sysfs / "class" / "infiniband"):
        device = entry / "device"
        if device.exists() and _ADDRESS.fullmatch(device.resolve().name):
            found.append(_device(entry.name, device))
    return found


def find_ports(sysfs: Path) -> list[RdmaPort]:
    """Ports of all RDMA NICs."""
    return [
        RdmaPort(
            nic.name, port.name, _text(port / "link_layer"), _text(port / "state"),
            _text(port / "rate"),
        )
        for nic in _entries(sysfs / "class" / "infiniband")
        for port in _entries(nic / "ports")
    ]  # fmt: skip


def distance(left: Device, right: Device) -> Distance:
    """How far two devices are apart."""
    common = 0
    for one, other in zip(left.bridges, right.bridges, strict=False):
        if one != other:
            break
        common += 1
    if common == 0:
        return Distance.FAR
    # The root complex and the root port are the CPU's; what follows is a switch.
    return Distance.SWITCH if common > 2 else Distance.ROOT


def pair(
    gpus: Sequence[Device], nics: Sequence[Device]
) -> list[tuple[Device, Device | None, Distance]]:
    """Give every GPU a NIC of its own, the nearest pairs first; None when NICs run out."""
    pairs = sorted(
        (distance(gpu, nic), g, n) for g, gpu in enumerate(gpus) for n, nic in enumerate(nics)
    )
    chosen: dict[int, tuple[int, Distance]] = {}
    taken: set[int] = set()
    for apart, g, n in pairs:
        if g not in chosen and n not in taken:
            chosen[g] = n, apart
            taken.add(n)
    result: list[tuple[Device, Device | None, Distance]] = []
    for g, gpu in enumerate(gpus):
        if g in chosen:
            n, apart = chosen[g]
            result.append((gpu, nics[n], apart))
        else:
            result.append((gpu, None, Distance.FAR))
    return result


def _device(name: str, path: Path) -> Device:
    parts = path.resolve().parts
    above = [part for part in parts[:-1] if _ROOT_COMPLEX.fullmatch(part) or _is_address(part)]
    numa = _text(path / "numa_node")
    return Device(name, tuple(above), int(numa) if numa.lstrip("-").isdecimal() else -1)


def _is_address(part: str) -> bool:
    return _ADDRESS.fullmatch(part) is not None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []  # no such hardware


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # an attribute that this kernel or device does not have
