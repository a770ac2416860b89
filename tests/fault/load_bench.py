"""One real cluster for many faults. The engines' caches hold little more than one longest request,
a proxy is between engines and front, and the store is on a small disk where that can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster_kit import Running, cluster_description, free_port, start, until_ready
from cluster_parts import Parts
from control_proxy import ControlProxy

from dualpath.engine import models
from dualpath.engine.launch import installed_device, plain_command

ENGINES = ("pe0", "de0", "de1")
REQUEST_S = 30.0
LAYER_S = 5.0
DISK_BYTES = 256 << 20
STORE = "160MiB"
"""How much is written depends on the machine's speed; the disk is full where a test fills it."""


@dataclass
class Bench:
    parts: Parts
    plain: Running
    proxy: ControlProxy
    store: Path
    disk: bool
    rss_bytes: dict[str, int] = field(default_factory=dict)


@contextmanager
def running_bench(folder: Path) -> Iterator[Bench]:
    """Everything started and ready."""
    disk = folder / "disk"
    disk.mkdir()
    with small_disk(disk) as mounted, bench_on(folder, disk / "store", mounted) as bench:
        yield bench


@contextmanager
def bench_on(folder: Path, store: Path, mounted: bool) -> Iterator[Bench]:
    """The same with the store at ``store``."""
    config = cluster_description(
        str(models.ensure(models.BundledModel.TINY)),
        store,
        free_port(),
        nodes=[
            # A slow network: a PE's blocks stay in use while they are pushed.
            {"name": "p", "role": "prefill", "base_port": free_port(), "cnic": {"rate": "8MB/s"}},
            {"name": "d0", "role": "decode", "base_port": free_port(), "snic": {"read": "20MB/s"}},
            {"name": "d1", "role": "decode", "base_port": free_port(), "snic": {"read": "20MB/s"}},
        ],
        front={"port": free_port(), "control_port": free_port(), "max_retries": 4},
        storage={"path": str(store), "fsync": False, "capacity": STORE},
        # The longest request is 32 blocks of 256 KiB.
        engine={"kv_cache": "9MiB", "max_batched_tokens": 256, "max_num_seqs": 8},
        timeouts={
            "transfer": "5s", "layer": f"{LAYER_S}s", "request": f"{REQUEST_S}s",
            "admission": "25s", "storage": "5s", "durable": "5s", "connect": "10s",
        },
        scheduler={"report_timeout": "2s"},
    )  # fmt: skip
    proxy = ControlProxy(config.front.control_port, free_port())
    parts = Parts(config, folder, control=f"127.0.0.1:{proxy.port}")
    port = free_port()
    command = plain_command(
        config, python=sys.executable, device=installed_device(), host="127.0.0.1", http_port=port
    )
    url = f"http://127.0.0.1:{port}"
    plain = start(list(command.argv), folder / "plain.log", url, dict(command.env))
    try:
        for name in ("front", *ENGINES):
            parts.start(name)
        until_ready(plain, "/health")
        parts.until_ready()
        yield Bench(parts, plain, proxy, store, mounted)
    finally:
        parts.stop_all()
        plain.stop()
        proxy.stop()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a tmpfs there; False where that is not allowed. It goes with this process, however
    that ends: whoever unmounts it waits for the end of a pipe."""
    if os.geteuid() != 0 or subprocess.call(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "dualpath-test", str(folder)]
    ):
        yield False
        return
    guard = subprocess.Popen(
        ["sh", "-c", 'cat > /dev/null; umount --lazy "$1"', "sh", str(folder)],
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert guard.stdin is not None
    try:
        yield True
    finally:
        guard.stdin.close()
        assert guard.wait(30) == 0


def kill_connections(parts: Parts) -> int:
    """Abort, in the kernel, every TCP connection between the PE and a DE; how many there were."""
    ends = {
        (connection.laddr, connection.raddr)
        for name in ("de0", "de1")
        for process in parts.processes(name)
        for connection in process.net_connections("tcp")
        if connection.raddr
    }
    killed = 0
    for process in parts.processes("pe0"):
        for connection in process.net_connections("tcp"):
            if connection.raddr and (connection.raddr, connection.laddr) in ends:
                ours, theirs = connection.laddr, connection.raddr
                subprocess.run(
                    ["ss", "-K", "-t", "src", f"{ours.ip}:{ours.port}", "dst",
                     f"{theirs.ip}:{theirs.port}"],
                    check=True, capture_output=True, timeout=10,
                )  # fmt: skip
                killed += 1
    return killed
