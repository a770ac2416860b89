"""Whether UCX will find a port to listen on.

UCX draws ports from the configured range until one is free. When none is, it goes on drawing for
ever, inside the call that makes the agent (UCX of nixl-cu12 1.5.1), so this is asked before.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

from dualpath.fabric import parse_ports

_SIOCGIFADDR: Final = 0x8915
"""Linux's request for an interface's IPv4 address (linux/sockios.h)."""
_REQUEST_BYTES: Final = 256
_ADDRESS_OFFSET: Final = 20
"""Of the address in a struct ifreq that holds a sockaddr_in."""


def has_free_port(ports: str, device: str) -> bool:
    """Whether any port of ``low-high`` can be listened on, on ``device``'s address.

    Args:
        device: a network interface; empty, or one without an IPv4 address, for any address.

    Raises:
        ValueError: ``ports`` is not a range.
    """
    span = parse_ports(ports)
    if span is None:
        return True
    address = _address(device)
    return any(_free(address, port) for port in range(span[0], span[1] + 1))


def _free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        # Connections that ended a moment ago do not count: their port is free within a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def _address(device: str) -> str:
    if not device:
        return ""
    request = struct.pack(f"{_REQUEST_BYTES}s", device.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""  # no such interface, which UCX will say, or one with IPv6 only
    return socket.inet_ntoa(answer[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4])
