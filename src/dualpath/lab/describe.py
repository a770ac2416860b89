"""The cluster file of a lab. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from dualpath.config import ClusterConfig, Role, parse
from dualpath.lab import names
from dualpath.lab.names import FRONT, Net
from dualpath.lab.spec import LabSpec

API_PORT: Final = 8000
_CONTROL_PORT: Final = 8001
_ENGINE_PORT: Final = 8100
_KV_PORTS: Final = "20480-20511"
"""Outside the ephemeral ports; a power of two, so that few rules match it."""


def cluster_of(spec: LabSpec, admin_key: str = "") -> ClusterConfig:
    """The cluster as the front and the engines read it.

    NIC rates are the kernel's: only the compute NIC's is in the file too, because the traffic
    classes are made from it.

    Args:
        admin_key: of the front; it listens beyond loopback.

    Raises:
        ConfigError: ``spec.tables`` has something wrong.
    """
    hosts = {host.name: host for host in names.hosts(spec.engines)}
    nodes = [
        {
            "name": name,
            "role": role.value,
            "host": Net.COMPUTE.address(hosts[name].number),
            "base_port": _ENGINE_PORT,
            "cnic": {"device": names.CNIC, "rate": f"{spec.cnic_mbit!r}Mbit/s"},
        }
        for role in Role
        for name in spec.nodes(role)
    ]
    data: dict[str, Any] = {
        "name": "lab",
        "model": {"path": spec.model},
        "mode": spec.mode.value,
        "benchmark": True,  # so that oracle is there to compare with
        "nodes": nodes,
        "front": {
            "host": names.FRONT_API_HOST,
            "port": API_PORT,
            "control_host": Net.COMPUTE.address(hosts[FRONT].number),
            "control_port": _CONTROL_PORT,
        },
        # A lab loses its store when it ends: nothing is gained by waiting for the disk that all
        # hosts of this machine share.
        "storage": {"path": str(names.STORE_DIR / names.KV_STORE), "fsync": False},
        "buffers": {
            "prefill": "256MiB",
            "decode": "256MiB",
            "landing": "32MiB",
            "persist": "64MiB",
        },
        "engine": {
            "kv_cache": "256MiB",
            "layer_aliasing": spec.layer_aliasing,
            "threads": max(1, (os.cpu_count() or 1) // (spec.prefill + spec.decode)),
        },
        # Reads of all agents queue at a NIC of a few MB/s; that is slow, not broken.
        "timeouts": {"storage": "300s", "admission": "300s", "layer": "300s", "transfer": "60s"},
        "fabric": {"kv": {"ports": _KV_PORTS}},
        "security": {"admin_key": admin_key},
    }
    return parse(_merged(data, spec.tables), "lab")


def _merged(data: dict[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for name, table in tables.items():
        own = merged.get(name)
        if isinstance(own, dict) and isinstance(table, Mapping):
            merged[name] = {**own, **table}
        else:
            merged[name] = table
    return merged
