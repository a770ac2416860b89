"""Whether the NIC keeps the two classes apart on RoCE, seen from this machine.

Switches cannot be asked from here: they must have the same classes. Whether packets carry their
DSCP shows in the counters by priority.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.fabric import FabricConfig
from dualpath.transfer.qos.rdma_ports import ETHERNET, RdmaPort, find_ports
from dualpath.transfer.qos.roce import FILE_NAME, weights
from dualpath.transfer.qos.roce_state import (
    InterfaceState,
    parse_global_class,
    parse_interface,
    parse_sent_bytes,
)
from dualpath.transfer.qos.system import System, ToolFailed, ToolMissing, read
from dualpath.transfer.qos.verdict import Check, Counted, Verdict
from dualpath.transfer.qos.watch import watch

_TODO = f"run {FILE_NAME}, which `dualpath qos render --fabric roce --out DIR` writes"


def check_roce(
    config: ClusterConfig, node: NodeConfig, system: System, interval_s: float
) -> tuple[list[Check], list[Counted]]:
    """Look at one node's RoCE interfaces, and watch their counters for ``interval_s``."""
    ports = find_ports(system.sysfs, node, ETHERNET)
    if not ports:
        text = "there is no RoCE port here: it cannot be told"
        return [Check(node.name, "ports", Verdict.UNKNOWN, text)], []
    checks: list[Check] = []
    readable: list[str] = []
    for port in ports:
        checks += _check_override(node, system, port)
        if not port.interfaces:
            text = "the device shows no network interface: it cannot be told"
            checks.append(Check(f"{node.name} {port.name}", "interface", Verdict.UNKNOWN, text))
        for interface in port.interfaces:
            where = f"{node.name} {interface}"
            try:
                state = parse_interface(system.run(["mlnx_qos", "-i", interface]))
            except (ToolMissing, ToolFailed, ValueError) as error:
                text = f"it cannot be told: {error}"
                todo = "install mlnx-tools and run this as root"
                checks.append(Check(where, "classes", Verdict.UNKNOWN, text, todo))
                continue
            checks += judge_interface(config.fabric, where, state)
            readable.append(interface)
    return checks, watch(
        readable,
        lambda interface: _sent(system, interface),
        lambda interface: f"{node.name} {interface}",
        (config.fabric.roce.model_priority, config.fabric.roce.kv_priority),
        interval_s,
    )


def judge_interface(fabric: FabricConfig, where: str, state: InterfaceState) -> Iterator[Check]:
    """Compare an interface with the cluster file."""
    roce = fabric.roce
    dscps = {fabric.kv.dscp: roce.kv_priority, fabric.model.dscp: roce.model_priority}
    shown = {dscp: state.priority_of_dscp.get(dscp) for dscp in dscps}
    classes = {priority: priority for priority in roce.lossless}
    found = {priority: state.class_of_priority.get(priority) for priority in roce.lossless}
    shares = {number: share for number, share in enumerate(weights(fabric)) if share}
    for what, is_now, right in (
        ("trust", state.trust, "dscp"),
        ("priority of DSCP", shown, dscps),
        ("PFC", sorted(state.lossless), sorted(roce.lossless)),
        ("class of priority", found, classes),
        ("weights", {n: state.weights.get(n) for n in shares}, shares),
    ):
        if is_now == right:
            yield Check(where, what, Verdict.IN_FORCE, f"{is_now}")
        else:
            text = f"{is_now} instead of {right}"
            yield Check(where, what, Verdict.NOT_IN_FORCE, text, _TODO)


def _check_override(node: NodeConfig, system: System, port: RdmaPort) -> Iterator[Check]:
    path = system.sysfs / "class" / "infiniband" / port.device / "tc" / str(port.number)
    forced = parse_global_class(read(path / "traffic_class"))
    if forced is not None:
        yield Check(
            f"{node.name} {port.name}",
            "traffic class",
            Verdict.NOT_IN_FORCE,
            f"the device gives every packet {forced}, whatever applications ask for",
            f"unset {path / 'traffic_class'}",
        )


def _sent(system: System, interface: str) -> dict[int, int]:
    return parse_sent_bytes(system.run(["ethtool", "-S", interface]))
