"""A transfer agent of one traffic class on a node's compute NIC, as the cluster file has it."""

from __future__ import annotations

from dualpath.config import ClusterConfig, NodeConfig, is_loopback
from dualpath.transfer.agent import PeerAgent
from dualpath.transfer.nixl_backend import UcxSettings
from dualpath.transfer.qos.classes import TrafficClass, marks

LOOPBACK = "lo"


def class_settings(config: ClusterConfig, node: NodeConfig, traffic: TrafficClass) -> UcxSettings:
    """How UCX reaches peers in one class of a node's NIC. It listens on every interface unless it
    is told one, so a node that is on loopback is given that."""
    chosen = marks(config, node, traffic)
    return UcxSettings(
        node.cnic.device or (LOOPBACK if is_loopback(node.host) else ""),
        chosen.ports,
        service_level=chosen.service_level,
        traffic_class=chosen.traffic_class,
    )


def class_agent(
    name: str, config: ClusterConfig, node: NodeConfig, traffic: TrafficClass
) -> PeerAgent:
    """An agent of one class. NIXL has no priority of a transfer, so that each (NIC, class) needs
    one of its own.

    Args:
        name: unique in the cluster and per start of the process.

    Raises:
        NixlMissing, AgentSetupError: see ``PeerAgent``.
    """
    settings = class_settings(config, node, traffic)
    return PeerAgent(
        name,
        device=settings.device,
        ports=settings.ports,
        rate_bytes_s=node.cnic.rate,
        service_level=settings.service_level,
        traffic_class=settings.traffic_class,
    )
