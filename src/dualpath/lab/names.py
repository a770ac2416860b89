"""What things of the lab are called and which addresses they have. Pure.

Everything that outlives a process has a name that begins with ``dualpath-lab``, so that it can be
found and removed by name alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "dualpath-lab"
RUN_DIR: Final = Path("/run") / PREFIX
"""Mount points, and the storage host's file system descriptions."""
BRICK_DIR: Final = Path("/var/tmp") / PREFIX
"""What the storage host stores: on a disk, because /run is memory."""
STORE_DIR: Final = RUN_DIR / "store"
"""Where every host sees the file system, each through a mount of its own."""
KV_STORE: Final = "kv"
"""The store's folder in the file system."""

SNIC: Final = "sn0"
CNIC: Final = "cn0"
MANAGEMENT_NIC: Final = "mg0"
LOOPBACK: Final = "lo"

FRONT: Final = "front"
STORAGE: Final = "storage"
SWITCH: Final = "switch"

MANAGEMENT_DEVICE: Final = f"{PREFIX}0"
"""This machine's end of the cable to the front."""
MANAGEMENT_HOST: Final = "198.18.0.1"
FRONT_API_HOST: Final = "198.18.0.2"
MANAGEMENT_BITS: Final = 30


class Net(enum.Enum):
    """A network of the lab; the value is the device by which a node is on it."""

    STORAGE = SNIC
    COMPUTE = CNIC

    @property
    def bridge(self) -> str:
        """The bridge in the switch."""
        return f"br-{self.value}"

    def port(self, node: str) -> str:
        """The switch's end of a node's cable."""
        return f"{self.value}-{node}"

    def address(self, number: int) -> str:
        """IPv4 address of the host with that number. 198.18.0.0/15 is for tests of networks
        (RFC 2544) and not routed anywhere."""
        return f"198.18.{1 if self is Net.COMPUTE else 2}.{number}"


NET_BITS: Final = 24


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the lab.

    Attributes:
        name: ``front``, ``storage``, or an engine's name.
        number: the last part of its addresses.
        nets: the networks it is on.
    """

    name: str
    number: int
    nets: tuple[Net, ...]

    @property
    def namespace(self) -> str:
        """Its network namespace."""
        return namespace(self.name)

    @property
    def mount_dir(self) -> Path:
        """Where this host's own mount of the file system is made."""
        return RUN_DIR / self.name


def namespace(name: str) -> str:
    """The network namespace of a host, or of the switch."""
    return f"{PREFIX}-{name}"


def hosts(engines: tuple[str, ...]) -> Iterator[Host]:
    """Storage host, front, and a host for each engine."""
    both = (Net.STORAGE, Net.COMPUTE)
    yield Host(STORAGE, 1, (Net.STORAGE,))
    yield Host(FRONT, 2, both)
    for index, name in enumerate(engines):
        yield Host(name, 10 + index, both)
