"""Limits, memory, ports and clock of this machine, against what the cluster file asks for."""

from __future__ import annotations

import ctypes
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualpath.config import ClusterConfig, NodeConfig, Role
from dualpath.doctor.finding import Finding, fail, ok, warn
from dualpath.serve.ports import is_free

MIN_OPEN_FILES: Final = 4096
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: all there is, and what is available now; a container's limit counts."""

    total_bytes: int
    available_bytes: int


def local_nodes(config: ClusterConfig) -> list[NodeConfig]:
    """The nodes of the cluster whose address is this machine's."""
    return [node for node in config.nodes if _is_ours(node.host)]


def check_limits(needs_locked_bytes: int) -> Iterator[Finding]:
    """Open files and locked memory.

    Args:
        needs_locked_bytes: memory that is registered with an RDMA NIC; 0 where there is none.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        yield warn(
            "open files", f"at most {files}", f"ulimit -n {MIN_OPEN_FILES * 16} (LimitNOFILE=)"
        )
    else:
        yield ok("open files", _amount(files, ""))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _amount(locked, " bytes")
    if not needs_locked_bytes:
        yield ok("locked memory", f"{text}; nothing is registered with an RDMA NIC here")
    elif locked != resource.RLIM_INFINITY and locked < needs_locked_bytes:
        yield fail(
            "locked memory", f"{text}, but the engines here register {needs_locked_bytes:,}",
            "ulimit -l unlimited (LimitMEMLOCK=infinity)",
        )  # fmt: skip
    else:
        yield ok("locked memory", text)


def registered_bytes(config: ClusterConfig, nodes: Sequence[NodeConfig]) -> int:
    """Buffers of all engines of ``nodes``."""
    return sum(node.engines * _buffer_bytes(config, node.role) for node in nodes)


def check_memory(
    config: ClusterConfig, nodes: Sequence[NodeConfig], memory: Memory, *, on_cpu: bool
) -> Iterator[Finding]:
    """Whether buffers, and on a CPU the KV cache and weights too, fit into memory.

    Args:
        on_cpu: engines keep their KV cache and weights in this memory.
    """
    if not nodes:
        return
    engines = sum(node.engines for node in nodes)
    needed = registered_bytes(config, nodes)
    parts = [f"buffers {needed:,}"]
    if on_cpu:
        weights = weight_bytes(Path(config.model.path))
        needed += engines * (config.engine.kv_cache + weights)
        parts.append(f"{engines} x (KV cache {config.engine.kv_cache:,} + weights {weights:,})")
    text = (
        f"{needed:,} bytes asked for ({', '.join(parts)}); "
        f"{memory.available_bytes:,} of {memory.total_bytes:,} available"
    )
    todo = "make buffers.* or engine.kv_cache smaller, or run fewer engines here"
    if needed > memory.total_bytes:
        yield fail("memory", text, todo)
    elif needed > memory.available_bytes:
        yield warn("memory", text, f"{todo}; or free some (are the engines running already?)")
    else:
        yield ok("memory", text)


def read_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """This machine's memory.

    Raises:
        OSError, ValueError: the kernel does not tell.
    """
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    limit = _number(cgroup / "memory.max")
    if limit is not None and limit < total:
        used = _number(cgroup / "memory.current") or 0
        return Memory(limit, min(available, max(0, limit - used)))
    return Memory(total, available)


def weight_bytes(model: Path) -> int:
    """Bytes of a model's weight files; 0 when they are not here yet."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def check_ports(config: ClusterConfig, nodes: Sequence[NodeConfig]) -> Iterator[Finding]:
    """Whether the ports of the front and of the engines here can be had."""
    wanted: list[tuple[str, str, int]] = []
    front = config.front
    for field, host, port in (
        ("front.port", front.host, front.port),
        ("front.control_port", front.control_host, front.control_port),
    ):
        if not _is_known(host):
            yield fail(
                "hosts", f"front: {host} has no address here",
                f"correct {field.replace('port', 'host')}, or add it to DNS or /etc/hosts",
            )  # fmt: skip
        elif port and _is_ours(host):
            wanted.append((field, host, port))
    for node in nodes:
        if node.base_port:
            wanted += [
                (f"nodes.{node.name}.base_port", node.host, node.base_port + index)
                for index in range(node.engines)
            ]
    taken = [(field, host, port) for field, host, port in wanted if not is_free(host, port)]
    for field, host, port in taken:
        yield warn(
            "ports", f"{field}: {host}:{port} is taken",
            "choose another, unless that is this cluster, running",
        )  # fmt: skip
    if wanted and not taken:
        yield ok("ports", f"{', '.join(str(port) for _field, _host, port in wanted)} are free")


def check_clock() -> Finding:
    """Whether the kernel's clock is kept right by somebody."""
    libc = ctypes.CDLL(None, use_errno=True)
    # struct timex is all zeros for a question; the state is the return value.
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        return warn("clock", "the kernel does not tell whether it is synchronised")
    if state == _TIME_ERROR:
        return warn(
            "clock", "not synchronised",
            "run chrony or systemd-timesyncd: logs of several nodes are compared by time, and "
            "eviction by the time of use",
        )  # fmt: skip
    return ok("clock", "synchronised")


def _buffer_bytes(config: ClusterConfig, role: Role) -> int:
    sizes = config.buffers
    if role is Role.PREFILL:
        return sizes.prefill + sizes.landing
    return sizes.decode + sizes.persist


def _is_ours(host: str) -> bool:
    try:
        is_free(host, 0)
    except OSError:
        return False
    return True


def _is_known(host: str) -> bool:
    """Whether the name, or number, stands for an address."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _amount(limit: int, unit: str) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit:,}{unit}"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # no such cgroup: no limit
    return int(text) if text.isdecimal() else None
