"""Command lines of the peers' processes. Pure.

An engine is vLLM's own API server, set in every other respect as the cluster's engines are. Names
of settings: vLLM 0.32, ``NixlConnector`` and ``MooncakeStoreConnector``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dualpath.config import ClusterConfig, Role
from dualpath.engine.launch import Command, Device, plain_command
from dualpath.lab.names import CNIC
from dualpath.lab.peers.kinds import Peer

DECODE_TTL_S: Final = 480
"""How long a decode engine keeps a finished turn's KV for the next turn: vLLM's default."""
FORGET_S: Final = DECODE_TTL_S - 30
"""After that the router does not offer it any more, so that nobody reads what was freed."""
MASTER_PORT: Final = 50051
POOL_PORT: Final = 50052
_METRICS_PORT: Final = 9003
_SIDE_PORT: Final = 5600
_LOCAL_BUFFER_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs.

    Attributes:
        role: of the engine.
        name: of the engine and its node.
        host, http_port: of its API, on the compute network.
        storage_host: its address on the storage network.
        kv_ports: ``first-last``, the TCP ports of KV traffic on the compute network.
    """

    role: Role
    name: str
    host: str
    http_port: int
    storage_host: str
    kv_ports: str


@dataclass(frozen=True, slots=True)
class Pool:
    """The storage host's part of Mooncake.

    Attributes:
        host: its address on the storage network.
        config_file: where engines read how to reach it.
        bytes: memory for KV.
    """

    host: str
    config_file: Path
    bytes: int


def engine_command(
    peer: Peer,
    config: ClusterConfig,
    place: Place,
    *,
    packages: Path,
    pool: Pool,
    device: Device,
    inherited: Mapping[str, str],
) -> Command:
    """One engine of a peer.

    Args:
        config: model and engine settings.
        packages: see ``packages.ensure``.
        inherited: environment the command will be started in; only read.
    """
    plain = plain_command(
        config,
        python=sys.executable,
        device=device,
        host=place.host,
        http_port=place.http_port,
        inherited=inherited,
    )
    paths = [str(packages), inherited.get("PYTHONPATH", "")]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "UCX_TLS": "tcp",  # shared memory would go around the NIC
        "UCX_NET_DEVICES": CNIC,
        "UCX_TCP_PORT_RANGE": place.kv_ports,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": place.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_PORT),
    }
    if peer is Peer.MOONCAKE_STORE:
        env |= {
            "MOONCAKE_CONFIG_PATH": str(pool.config_file),
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": place.storage_host,
        }
    connector = json.dumps(_connector(peer, place))
    return Command((*plain.argv, "--kv-transfer-config", connector), {**plain.env, **env})


def _connector(peer: Peer, place: Place) -> dict[str, Any]:
    role = _kv_role(place.role)
    nixl: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        # As ours: what cannot be fetched is computed again. The default fails the request.
        "kv_load_failure_policy": "recompute",
    }
    if peer is Peer.NIXL_BIDIRECTIONAL:
        nixl["kv_connector_extra_config"] = {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": DECODE_TTL_S,
        }
    if peer is not Peer.MOONCAKE_STORE:
        return nixl
    store = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "save_decode_cache": True,  # without it nothing that was generated is ever hit
            # Part of a socket's path. All nodes of the lab have one /tmp and one host name.
            "lookup_rpc_port": place.name,
        },
    }
    # The first that has a prompt's KV loads it: on the decode side that is NIXL, always.
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, store]},
    }


def _kv_role(role: Role) -> str:
    return "kv_producer" if role is Role.PREFILL else "kv_consumer"


def pool_config(pool: Pool) -> dict[str, Any]:
    """What ``pool.config_file`` holds: engines bring no memory of their own into the pool."""
    return {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{pool.host}:{MASTER_PORT}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": _LOCAL_BUFFER_BYTES,
    }


def master_argv(packages: Path, pool: Pool) -> list[str]:
    """The process that knows where what lies."""
    return [
        str(packages / "mooncake" / "mooncake_master"),
        f"-rpc_address={pool.host}",
        f"-rpc_port={MASTER_PORT}",
        f"-metrics_host={pool.host}",
        f"-metrics_port={_METRICS_PORT}",
        "-logtostderr",
    ]


def pool_argv(packages: Path, pool: Pool) -> list[str]:
    """The process that holds the memory."""
    return [
        str(packages / "mooncake" / "mooncake_client"),
        f"-host={pool.host}",
        f"-port={POOL_PORT}",
        f"-master_server_address={pool.host}:{MASTER_PORT}",
        "-metadata_server=P2PHANDSHAKE",
        "-protocol=tcp",
        f"-global_segment_size={pool.bytes >> 20} MB",
        "-logtostderr",
    ]


def router_argv(
    peer: Peer, listen: tuple[str, int], prefill: Sequence[str], decode: Sequence[str]
) -> list[str]:
    """The process that clients talk to.

    Args:
        listen: address and port.
        prefill, decode: the engines' URLs.
    """
    argv = [sys.executable, "-m", "dualpath.lab.peers.router"]
    argv += ["--host", listen[0], "--port", str(listen[1])]
    for option, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            argv += [option, url]
    if peer is Peer.NIXL_BIDIRECTIONAL:
        argv += ["--keep-s", str(FORGET_S)]
    return argv
