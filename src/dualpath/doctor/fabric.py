"""GPU-NIC pairs, RDMA ports, traffic classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dualpath.config import ClusterConfig, ConfigError, NodeConfig
from dualpath.doctor.finding import Finding, fail, ok, warn
from dualpath.doctor.pci import Distance, find_gpus, find_nics, find_ports, pair
from dualpath.transfer.qos.check import check
from dualpath.transfer.qos.system import System, ThisMachine
from dualpath.transfer.qos.verdict import Verdict


def check_pairs(sysfs: Path) -> Iterator[Finding]:
    """Whether each GPU has a NIC under its own PCIe switch."""
    gpus, nics = find_gpus(sysfs), find_nics(sysfs)
    if not gpus:
        yield ok("gpu", "no GPU found: engines of this node run on the CPU")
        return
    yield ok("gpu", f"{len(gpus)} found: {', '.join(gpu.name for gpu in gpus)}")
    if not nics:
        yield warn(
            "gpu-nic", "no RDMA NIC found: KV between engines goes over TCP",
            "install an RDMA NIC beside each GPU, or expect the compute network to be the limit",
        )  # fmt: skip
        return
    for gpu, nic, apart in pair(gpus, nics):
        yield _judge_pair(gpu.name, nic.name if nic else "", apart, bool(gpu.bridges[1:]))


def _judge_pair(gpu: str, nic: str, apart: Distance, has_bridges: bool) -> Finding:
    if not nic:
        return warn(
            "gpu-nic", f"GPU {gpu} has no NIC of its own", "one RDMA NIC per GPU is assumed"
        )
    if apart is Distance.SWITCH:
        return ok("gpu-nic", f"GPU {gpu} and {nic} are under one PCIe switch")
    if not has_bridges:
        return warn(
            "gpu-nic", f"GPU {gpu}, {nic}: this machine shows no PCIe bridges, as virtual ones do",
            "look at the topology on the host",
        )  # fmt: skip
    where = "other root complexes" if apart is Distance.FAR else "one root complex, not one switch"
    return warn(
        "gpu-nic", f"GPU {gpu} and {nic} are under {where}: their bytes pass the CPU",
        "move the NIC to the GPU's PCIe switch, or choose another pair (nodes.cnic.device)",
    )  # fmt: skip


def check_fabric(
    sysfs: Path, nodes: Sequence[NodeConfig], config: ClusterConfig | None = None
) -> Iterator[Finding]:
    """RDMA ports up, configured devices there, traffic classes in force.

    Args:
        nodes: those of ``config`` that this machine is.
    """
    ports = find_ports(sysfs)
    for port in ports:
        text = f"{port.nic} port {port.number}: {port.link_layer}, {port.state}, {port.rate}"
        if "ACTIVE" in port.state:
            yield ok("rdma port", text)
        else:
            yield warn("rdma port", text, "plug it in or bring the link up, if it is to be used")
    known = {port.nic for port in ports} | _interfaces(sysfs)
    for node in nodes:
        # UCX names a device with its port: mlx5_0:1.
        device = node.cnic.device
        if device and device.partition(":")[0] not in known:
            yield fail(
                "cnic", f"nodes.{node.name}.cnic.device: no device is called {device!r}",
                f"choose one of {', '.join(sorted(known)) or 'none: there is none'}",
            )  # fmt: skip
    if config is None or not nodes:
        kind = "RDMA hardware" if ports else "no RDMA hardware"
        yield warn(
            "fabric classes", f"not looked at: there is {kind}, and no cluster file for this node",
            "dualpath qos check --config FILE",
        )  # fmt: skip
    else:
        yield from check_classes(ThisMachine(sysfs), nodes, config)


def check_classes(
    system: System, nodes: Sequence[NodeConfig], config: ClusterConfig
) -> Iterator[Finding]:
    """What ``dualpath qos check`` finds, without watching counters."""
    kind = config.fabric.kind
    try:
        report = check(config, nodes, kind, system, interval_s=0)
    except ConfigError as error:
        yield warn("fabric classes", f"they cannot be told: {error}", "see docs/traffic.md")
        return
    if report.verdict is Verdict.IN_FORCE:
        where = ", ".join(dict.fromkeys(found.where for found in report.checks))
        yield ok("fabric classes", f"in force on {where}")
    for found in report.checks:
        if found.verdict is not Verdict.IN_FORCE:
            text = f"{found.verdict.value}: {found.where}: {found.what}: {found.text}"
            yield warn("fabric classes", text, found.todo or "see docs/traffic.md")


def _interfaces(sysfs: Path) -> set[str]:
    try:
        return {entry.name for entry in (sysfs / "class" / "net").iterdir()}
    except FileNotFoundError:
        return set()
