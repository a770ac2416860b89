"""The two traffic classes and the marks that a transfer agent gives its packets."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.fabric import Fabric, parse_ports


class TrafficClass(enum.Enum):
    """What traffic is for.

    MODEL: collectives and expert dispatch; served first. KV: blocks between engines; guaranteed
    little, may use all that is idle.
    """

    MODEL = "model"
    KV = "kv"


@dataclass(frozen=True, slots=True)
class Marks:
    """How the packets of one class look on one fabric; None where the fabric does not use it.

    Attributes:
        ports: ``low-high`` TCP ports to listen on; empty for any.
        service_level: InfiniBand's SL.
        traffic_class: the whole byte of the IP header on RoCE: DSCP and the two ECN bits.
    """

    ports: str = ""
    service_level: int | None = None
    traffic_class: int | None = None

    def ucx_settings(self) -> dict[str, str]:
        """UCX's settings, without ``UCX_``."""
        settings = {}
        if self.ports:
            settings["TCP_PORT_RANGE"] = self.ports
        if self.service_level is not None:
            settings["IB_SL"] = str(self.service_level)
        if self.traffic_class is not None:
            settings["IB_TRAFFIC_CLASS"] = str(self.traffic_class)
        return settings


def marks(
    config: ClusterConfig,
    node: NodeConfig,
    traffic: TrafficClass,
    fabric: Fabric | None = None,
) -> Marks:
    """Marks of one class on one node.

    Args:
        fabric: other than the cluster file's.
    """
    settings = config.fabric
    chosen = settings.kv if traffic is TrafficClass.KV else settings.model
    ports = (traffic is TrafficClass.KV and node.cnic.ports) or chosen.ports
    match fabric or settings.kind:
        case Fabric.TCP:
            return Marks(ports)
        case Fabric.IB:
            return Marks(ports, service_level=chosen.sl)
        case Fabric.ROCE:
            return Marks(ports, traffic_class=traffic_class_byte(chosen.dscp, settings.roce.ecn))


def traffic_class_byte(dscp: int, ecn: int = 0) -> int:
    """The IP header's byte: DSCP in the six high bits (RFC 2474), ECN below."""
    return dscp << 2 | ecn


def kv_port_ranges(config: ClusterConfig) -> tuple[tuple[int, int], ...]:
    """Every range in which some node's agents listen for KV, lowest first: a packet to any of
    them, or from it, is KV's."""
    texts = {marks(config, node, TrafficClass.KV, Fabric.TCP).ports for node in config.nodes}
    return tuple(sorted(ports for text in texts if (ports := parse_ports(text)) is not None))
