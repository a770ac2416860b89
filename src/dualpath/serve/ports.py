"""Free TCP ports for a cluster on one machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_LOW: Final = 10_000
_USUAL_EPHEMERAL_LOW: Final = 32_768
_TRIES: Final = 2_000


class NoFreePort(RuntimeError):
    """So many ports are in use that none was found."""


def free_ports(host: str, count: int, taken: frozenset[int] = frozenset()) -> list[int]:
    """``count`` consecutive ports of ``host`` that nobody listens on now.

    An engine listens a minute after its port was chosen. So ports come from below the range from
    which the kernel serves outgoing connections: nobody gets those by chance.

    Raises:
        NoFreePort: none found.
        OSError: ``host`` is not an address of this machine.
    """
    high = _ephemeral_low() - count
    for _ in range(_TRIES):
        first = random.randrange(_LOW, high)
        ports = list(range(first, first + count))
        if taken.isdisjoint(ports) and all(is_free(host, port) for port in ports):
            return ports
    raise NoFreePort(f"no {count} free ports in a row on {host} between {_LOW} and {high}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.

    Raises:
        OSError: ``host`` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))  # tells a wrong host from a taken port
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _ephemeral_low() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return _USUAL_EPHEMERAL_LOW
    low = int(text.split()[0])
    # A machine that gives outgoing connections everything leaves no quiet range.
    return low if low > _LOW + 1_000 else _USUAL_EPHEMERAL_LOW
