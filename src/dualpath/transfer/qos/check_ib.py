"""Whether the subnet manager made the virtual lanes of the two classes, seen from local ports.

Only the ports of this machine are asked. Switches are programmed by the same opensm from the same
tables; whether packets carry their service level shows in counters alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.fabric import FabricConfig
from dualpath.transfer.qos.ib_state import PortState, parse_port, parse_sent_bytes
from dualpath.transfer.qos.opensm import FILE_NAME, lane_weights, lanes
from dualpath.transfer.qos.rdma_ports import INFINIBAND, RdmaPort, find_ports
from dualpath.transfer.qos.system import System, ToolFailed, ToolMissing
from dualpath.transfer.qos.verdict import Check, Counted, Verdict
from dualpath.transfer.qos.watch import watch

_TODO = f"put {FILE_NAME} of `dualpath qos render --fabric ib` into opensm's, and restart it"


def check_ib(
    config: ClusterConfig, node: NodeConfig, system: System, interval_s: float
) -> tuple[list[Check], list[Counted]]:
    """Look at one node's InfiniBand ports, and watch their counters for ``interval_s``."""
    ports = find_ports(system.sysfs, node, INFINIBAND)
    if not ports:
        text = "there is no InfiniBand port here: it cannot be told"
        return [Check(node.name, "ports", Verdict.UNKNOWN, text)], []
    checks: list[Check] = []
    readable: list[RdmaPort] = []
    for port in ports:
        where = f"{node.name} {port.name}"
        try:
            state = _read(system, port)
        except (ToolMissing, ToolFailed, ValueError) as error:
            text = f"it cannot be told: {error}"
            todo = "install infiniband-diags and run this as root"
            checks.append(Check(where, "arbitration", Verdict.UNKNOWN, text, todo))
            continue
        checks += judge_port(config.fabric, where, state)
        readable.append(port)
    return checks, watch(
        readable,
        lambda port: _sent(system, port),
        lambda port: f"{node.name} {port.name}",
        (config.fabric.model.sl, config.fabric.kv.sl),
        interval_s,
    )


def judge_port(fabric: FabricConfig, where: str, state: PortState) -> Iterator[Check]:
    """Compare a port with the cluster file.

    Raises:
        ConfigError: by the cluster file itself a class would never be sent.
    """
    ib = fabric.ib
    kv_lane, model_lane = lanes(fabric)
    wanted = {fabric.kv.sl: kv_lane, fabric.model.sl: model_lane}
    shown = {level: state.sl2vl[level] for level in wanted}
    high, low = _weights(ib.vlarb_high), _weights(ib.vlarb_low)
    top = max(kv_lane, model_lane)
    for what, is_so, found, right in (
        ("lanes in operation", state.lanes > top, f"{state.lanes}", f"more than {top}"),
        ("sl2vl", shown == wanted, _shown(shown), _shown(wanted)),
        ("high table", state.high == high, _shown(state.high), _shown(high)),
        ("low table", state.low == low, _shown(state.low), _shown(low)),
        ("high limit", state.high_limit == ib.high_limit, state.high_limit, ib.high_limit),
    ):
        if is_so:
            yield Check(where, what, Verdict.IN_FORCE, f"{found}")
        else:
            text = f"{found or 'nothing'} instead of {right}"
            yield Check(where, what, Verdict.NOT_IN_FORCE, text, _TODO)


def _weights(table: str) -> dict[int, int]:
    return {lane: weight for lane, weight in lane_weights(table).items() if weight}


def _shown(pairs: dict[int, int]) -> str:
    return ",".join(f"{key}:{value}" for key, value in sorted(pairs.items()))


def _read(system: System, port: RdmaPort) -> PortState:
    def ask(operation: str) -> str:
        # The direct route of no hops: the port itself, whether or not it has an address.
        where = ["-C", port.device, "-P", str(port.number), "-D"]
        return system.run(["smpquery", *where, operation, "0", str(port.number)])

    return parse_port(ask("portinfo"), ask("sl2vl"), ask("vlarb"))


def _sent(system: System, port: RdmaPort) -> dict[int, int]:
    where = ["-C", port.device, "-P", str(port.number)]
    argv = ["perfquery", *where, "--xmtsl", str(port.lid), str(port.number)]
    return parse_sent_bytes(system.run(argv))
