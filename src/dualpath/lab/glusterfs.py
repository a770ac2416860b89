"""The storage host's file system: GlusterFS from two descriptions of our own. Pure.

docs/lab.md says why this one. The server has a directory and locks, the client the connection and
nothing else: none of GlusterFS's caching, read-ahead or write-behind layers, so that a byte read
is a byte that passed the SNIC. No management daemon is needed for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dualpath.lab import names
from dualpath.lab.names import STORAGE, Host, Net

PORT: Final = 24100
TOOLS: Final = ("glusterfsd", "glusterfs")
PACKAGES: Final = "glusterfs-server glusterfs-client"
_EXPORT: Final = "dualpath-lab"

_PIECE_BYTES: Final = 128 << 10
"""The kernel cuts reads and writes of FUSE files into pieces of this size."""
_READ_ASKS: Final = (890, 137)
_WRITE_ANSWERS: Final = (5400, 368)
"""Bytes without packet headers, for each block and each piece of it: fitted to blocks of 256 KiB,
1 MiB and 3 MiB (docs/lab.md). Looking up, opening and closing are in the first."""


def server_description(address: str, brick: Path) -> str:
    """What the storage host serves, and where."""
    return _volumes(
        ("brick", "storage/posix", {"directory": str(brick)}, ""),
        (_EXPORT, "features/locks", {}, "brick"),
        (
            "server",
            "protocol/server",
            {
                "transport-type": "tcp",
                "transport.socket.bind-address": address,
                "transport.socket.listen-port": str(PORT),
                f"auth.addr.{_EXPORT}.allow": "*",
            },
            _EXPORT,
        ),
    )


def client_description(address: str) -> str:
    """What every host mounts."""
    options = {
        "transport-type": "tcp",
        "remote-host": address,
        "remote-port": str(PORT),
        "remote-subvolume": _EXPORT,
    }
    return _volumes(("client", "protocol/client", options, ""))


def _volumes(*layers: tuple[str, str, dict[str, str], str]) -> str:
    lines: list[str] = []
    for name, kind, options, below in layers:
        lines += [f"volume {name}", f"    type {kind}"]
        lines += [f"    option {key} {value}" for key, value in options.items()]
        lines += [f"    subvolumes {below}"] if below else []
        lines.append("end-volume")
    return "\n".join(lines) + "\n"


def server_argv(description: Path, log: Path) -> tuple[str, ...]:
    """The server; it goes into the background when it has its description."""
    pid_file = description.with_suffix(".pid")
    return ("glusterfsd", "-f", str(description), "-l", str(log), "-p", str(pid_file))


def mount_argv(host: Host, description: Path, log: Path) -> tuple[str, ...]:
    """A host's mount; returns when it is there.

    ``direct-io-mode`` passes the page cache by even where a file is opened without O_DIRECT.
    """
    return (
        *("glusterfs", "-f", str(description), "-l", str(log)),
        *("--direct-io-mode=enable", str(host.mount_dir)),
    )


def asked_bytes(blocks: int, content_bytes: int) -> int:
    """What a reader sends to get so many blocks with so many bytes in all."""
    return _messages(_READ_ASKS, blocks, content_bytes)


def answered_bytes(blocks: int, content_bytes: int) -> int:
    """What a writer is sent for so many blocks with so many bytes in all."""
    return _messages(_WRITE_ANSWERS, blocks, content_bytes)


def _messages(costs: tuple[int, int], blocks: int, content_bytes: int) -> int:
    each, piece = costs
    return each * blocks + piece * (content_bytes // _PIECE_BYTES)


def storage_address() -> str:
    """Of the storage host."""
    number = next(host.number for host in names.hosts(()) if host.name == STORAGE)
    return Net.STORAGE.address(number)
