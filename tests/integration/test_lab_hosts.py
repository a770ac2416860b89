"""The lab's hosts in the kernel, without engines: their NICs and classes, the file system that they
share, and running things inside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from dualpath.config import ConfigError
from dualpath.fabric import Fabric
from dualpath.lab import inside
from dualpath.lab.counting import NicBytes
from dualpath.lab.describe import cluster_of
from dualpath.lab.names import (
    CNIC,
    LOOPBACK,
    MANAGEMENT_HOST,
    SNIC,
    STORE_DIR,
    SWITCH,
    Net,
    namespace,
)
from dualpath.lab.network import LabNetwork, check_machine, lab_network
from dualpath.lab.removing import leftovers
from dualpath.lab.spec import LabSpec
from dualpath.transfer.qos.check import check
from dualpath.transfer.qos.system import ThisMachine
from dualpath.transfer.qos.verdict import Verdict

pytestmark = [
    pytest.mark.integration, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(300),
]  # fmt: skip

SPEC = LabSpec("no model", prefill=1, decode=1, snic_mbit=200.0, cnic_mbit=100.0)
FILE_BYTES = 16 << 20
PIECE_BYTES = 128 << 10
WAIT_S = 120.0
WRITE = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
for _ in range(int(sys.argv[2]) // (1 << 20)):
    os.write(fd, os.urandom(1 << 20))
os.fsync(fd)
"""
READ = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
total = 0
while piece := os.read(fd, 128 << 10):
    total += len(piece)
print(total)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000), 10) as out:
    for _ in range(16):
        out.sendall(bytes(1 << 20))
"""
RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 9000)) as server:
    server.settimeout(60)
    print("listening", flush=True)
    source, _ = server.accept()
    while source.recv(1 << 20):
        pass
"""

SHOUT = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
    out.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    for _ in range(100):
        out.sendto(bytes(1400), (sys.argv[1], 9000))
"""
SHOUTED_BYTES = 100 * 1400
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 22), 5)"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabNetwork]:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    with lab_network(SPEC, tmp_path_factory.mktemp("lab")) as made:
        yield made


def python(network: LabNetwork, host: str, program: str, *argv: str) -> str:
    command = network.command(host, [sys.executable, "-c", program, *argv])
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def counted(
    network: LabNetwork, before: dict[str, dict[str, NicBytes]]
) -> dict[str, dict[str, NicBytes]]:
    return {
        host: {device: now.since(before[host][device]) for device, now in devices.items()}
        for host, devices in network.nic_bytes().items()
    }


def close_to(payload: int, wanted: int) -> bool:
    """The file system's own messages are the rest; a few packets have other headers than most."""
    return 0.999 * wanted <= payload <= 1.02 * wanted


def test_files_pass_the_storage_nics_every_time(network: LabNetwork) -> None:
    path = str(STORE_DIR / "file")
    before = network.nic_bytes()
    python(network, "pe0", WRITE, path, str(FILE_BYTES))
    written = counted(network, before)
    assert close_to(written["pe0"][SNIC].tx_payload_bytes, FILE_BYTES)
    assert close_to(written["storage"][SNIC].rx_payload_bytes, FILE_BYTES)
    for host in ("pe0", "de0", "de0"):  # the one that wrote it, another one, and that one again
        before = network.nic_bytes()
        assert python(network, host, READ, path) == str(FILE_BYTES)
        read = counted(network, before)
        assert close_to(read[host][SNIC].rx_payload_bytes, FILE_BYTES)
        others = {"pe0", "de0", "front"} - {host}
        assert all(read[other][SNIC].rx_payload_bytes < PIECE_BYTES for other in others)
        for nics in read.values():
            assert nics[LOOPBACK].tx_bytes < PIECE_BYTES
            assert nics.get(CNIC, NicBytes()).tx_bytes < PIECE_BYTES


def test_the_compute_network_is_another_one(network: LabNetwork) -> None:
    receiver = subprocess.Popen(
        network.command("de0", [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
        before = network.nic_bytes()
        python(network, "pe0", SEND, network.address("de0", Net.COMPUTE))
        assert receiver.wait(WAIT_S) == 0
    finally:
        receiver.kill()
        receiver.wait()
    moved = counted(network, before)
    assert close_to(moved["pe0"][CNIC].tx_payload_bytes, FILE_BYTES)
    assert close_to(moved["de0"][CNIC].rx_payload_bytes, FILE_BYTES)
    assert all(moved[host][SNIC].tx_bytes < PIECE_BYTES for host in ("pe0", "de0", "storage"))
    # It was the model's class: its ports are not KV's.
    classes = network.class_bytes()["pe0"]
    assert classes["model"].bytes > FILE_BYTES > classes["kv"].bytes


@pytest.mark.parametrize(("net", "other"), [(Net.COMPUTE, Net.STORAGE), (Net.STORAGE, Net.COMPUTE)])
def test_networks_are_joined_nowhere(network: LabNetwork, net: Net, other: Net) -> None:
    """What is sent to everybody on one network comes to everybody there and to nobody else."""
    before = network.nic_bytes()
    python(network, "pe0", SHOUT, net.address(255))
    deadline_s = time.monotonic() + WAIT_S
    while counted(network, before)["de0"][net.value].rx_bytes < SHOUTED_BYTES:
        assert time.monotonic() < deadline_s, counted(network, before)
        time.sleep(0.05)
    heard = {
        (host, device): nic.rx_bytes
        for host, nics in counted(network, before).items()
        for device, nic in nics.items()
    }
    assert heard["front", net.value] >= SHOUTED_BYTES
    others = [heard[host, other.value] for host in network.hosts if (host, other.value) in heard]
    assert others and max(others) < SHOUTED_BYTES / 10


def test_a_host_knows_no_way_to_this_machine(network: LabNetwork) -> None:
    command = network.command("pe0", [sys.executable, "-c", REACH, MANAGEMENT_HOST])
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "Network is unreachable" in done.stderr


class Node:
    """A node's machine as ``qos check`` looks at it."""

    sysfs = Path("/sys")

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def run(self, argv: Sequence[str]) -> str:
        return ThisMachine().run(["ip", "netns", "exec", self._namespace, *argv])


def test_classes_are_in_force_at_both_ends_of_every_cable(network: LabNetwork) -> None:
    config = cluster_of(SPEC)
    for node in config.nodes:
        port = replace(node, cnic=replace(node.cnic, device=Net.COMPUTE.port(node.name)))
        for end, host in ((node, node.name), (port, SWITCH)):
            report = check(config, [end], Fabric.TCP, Node(namespace(host)), 0)
            assert report.verdict is Verdict.IN_FORCE, report


def test_locks_reach_from_host_to_host(network: LabNetwork) -> None:
    """What the store's writers recognise each other by."""
    hold = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""
    path = str(STORE_DIR / "lock")
    holder = subprocess.Popen(
        network.command("pe0", [sys.executable, "-c", hold, path]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        command = network.command("de0", [sys.executable, "-c", hold, path])
        second = subprocess.run(
            command, input="", capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert "BlockingIOError" in second.stderr
        holder.communicate("", timeout=WAIT_S)
        python(network, "de0", hold.replace("sys.stdin.read()", ""), path)
    finally:
        holder.kill()
        holder.wait()


def test_code_of_ours_runs_in_a_host_and_comes_back(network: LabNetwork) -> None:
    here = Path("/proc/thread-self/ns/net").readlink()
    there = inside.call("pe0", lambda: Path("/proc/thread-self/ns/net").readlink())
    assert there != here == Path("/proc/thread-self/ns/net").readlink()
    with pytest.raises(FileNotFoundError):
        inside.call("nobody", lambda: None)
    with pytest.raises(ZeroDivisionError):
        inside.call("pe0", lambda: 1 // 0)


def test_there_is_one_lab_a_machine(network: LabNetwork, tmp_path: Path) -> None:
    says = f"one runs already, of process {os.getpid()}"
    with pytest.raises(ConfigError, match=says), lab_network(SPEC, tmp_path):
        pass
    assert leftovers(), "the first one is still there"
