"""The environment file: what NCCL, NVSHMEM, DeepEP and UCX must be told to use their class.

Names from NCCL's and NVSHMEM's lists of environment variables, DeepEP's README and UCX's
configuration tables. Our transfer agents take UCX's part from the cluster file themselves; it is
in the file for other users of UCX.
"""

from __future__ import annotations

from typing import Final

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.fabric import Fabric
from dualpath.transfer.qos.classes import TrafficClass, marks
from dualpath.transfer.qos.text import File

_UCX_PREFIX: Final = "UCX_"


def variables(config: ClusterConfig, node: NodeConfig, fabric: Fabric) -> dict[str, str]:
    """Environment variables of the processes on ``node``."""
    model = marks(config, node, TrafficClass.MODEL, fabric)
    kv = marks(config, node, TrafficClass.KV, fabric).ucx_settings()
    chosen: dict[str, str] = {}
    match fabric:
        case Fabric.TCP:
            chosen["NCCL_IB_DISABLE"] = "1"
            kv["TLS"] = "tcp"
            if device := node.cnic.device:
                # With a leading '=' NCCL takes exactly this interface, not all that begin so.
                chosen["NCCL_SOCKET_IFNAME"] = f"={device}"
                kv["NET_DEVICES"] = device
        case Fabric.IB:
            level = str(model.service_level)
            chosen |= {
                "NCCL_IB_SL": level,
                "NVSHMEM_IB_SL": level,
                "EP_OVERRIDE_RDMA_SL": level,
            }
            kv.pop("TCP_PORT_RANGE", None)
        case Fabric.ROCE:
            byte = str(model.traffic_class)
            # Unset, NCCL's clear-to-send messages take NCCL_IB_TC.
            chosen |= {"NCCL_IB_TC": byte, "NVSHMEM_IB_TRAFFIC_CLASS": byte}
            kv.pop("TCP_PORT_RANGE", None)
    return chosen | {f"{_UCX_PREFIX}{name}": value for name, value in kv.items()}


def render(config: ClusterConfig, node: NodeConfig, fabric: Fabric, name: str) -> File:
    """``NAME=value`` lines, as systemd's EnvironmentFile, ``docker --env-file`` and
    ``set -a; . FILE`` read them."""
    lines = [f"{key}={value}" for key, value in variables(config, node, fabric).items()]
    return File(name, "\n".join(lines) + "\n")
