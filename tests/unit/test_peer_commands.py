"""Command lines of the lab's peers, and what their router remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.config import Role
from dualpath.engine.launch import Command, Device, plain_command
from dualpath.lab.describe import cluster_of
from dualpath.lab.peers import commands
from dualpath.lab.peers.commands import Place, Pool
from dualpath.lab.peers.kept import Keeping
from dualpath.lab.peers.kinds import PACKAGES, Peer
from dualpath.lab.peers.packages import NotInstalled, ensure, packages_dir
from dualpath.lab.spec import LabSpec

pytestmark = pytest.mark.unit

CONFIG = cluster_of(LabSpec(model="org/model"))
POOL = Pool("198.18.2.1", Path("/run/m.json"), 3 << 30)
PLACES = {
    Role.PREFILL: Place(Role.PREFILL, "pe0", "198.18.1.10", 8100, "198.18.2.10", "20480-20511"),
    Role.DECODE: Place(Role.DECODE, "de0", "198.18.1.11", 8100, "198.18.2.11", "20480-20511"),
}


def engine(peer: Peer, role: Role, **inherited: str) -> Command:
    return commands.engine_command(
        peer,
        CONFIG,
        PLACES[role],
        packages=Path("/p"),
        pool=POOL,
        device=Device.CPU,
        inherited=inherited,
    )


def connector(peer: Peer, role: Role) -> dict[str, Any]:
    argv = engine(peer, role).argv
    found: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return found


@pytest.mark.parametrize("peer", Peer)
@pytest.mark.parametrize("role", Role)
def test_an_engine_is_the_plain_one_with_a_connector(peer: Peer, role: Role) -> None:
    plain = plain_command(
        CONFIG, python=engine(peer, role).argv[0], device=Device.CPU,
        host=PLACES[role].host, http_port=8100,
    )  # fmt: skip
    found = engine(peer, role)
    assert found.argv[: len(plain.argv)] == plain.argv
    assert found.argv[len(plain.argv)] == "--kv-transfer-config"
    assert plain.env.items() <= found.env.items()
    assert len(found.argv) == len(plain.argv) + 2


@pytest.mark.parametrize("peer", Peer)
def test_kv_stays_on_the_compute_nic_and_in_its_class(peer: Peer) -> None:
    env = engine(peer, Role.DECODE, PYTHONPATH="/mine").env
    assert env["UCX_TLS"] == "tcp"
    assert env["UCX_NET_DEVICES"] == "cn0"
    assert env["UCX_TCP_PORT_RANGE"] == CONFIG.fabric.kv.ports
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "198.18.1.11"
    assert env["PYTHONPATH"] == "/p:/mine"


def test_what_becomes_of_a_turns_kv() -> None:
    plain = connector(Peer.NIXL, Role.PREFILL)
    assert plain["kv_connector"] == "NixlConnector" and plain["kv_role"] == "kv_producer"
    assert plain["kv_buffer_device"] == "cpu"
    assert "kv_connector_extra_config" not in plain
    kept = connector(Peer.NIXL_BIDIRECTIONAL, Role.DECODE)
    assert kept["kv_role"] == "kv_consumer"
    assert kept["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    both = connector(Peer.MOONCAKE_STORE, Role.DECODE)
    parts = both["kv_connector_extra_config"]["connectors"]
    assert both["kv_connector"] == "MultiConnector"
    assert [part["kv_connector"] for part in parts] == ["NixlConnector", "MooncakeStoreConnector"]
    stores = [
        connector(Peer.MOONCAKE_STORE, role)["kv_connector_extra_config"]["connectors"][1][
            "kv_connector_extra_config"
        ]
        for role in Role
    ]
    assert all(store["save_decode_cache"] is True for store in stores)
    assert stores[0]["lookup_rpc_port"] != stores[1]["lookup_rpc_port"]


@pytest.mark.parametrize("peer", Peer)
@pytest.mark.parametrize("role", Role)
def test_what_cannot_be_fetched_is_computed_again_as_with_ours(peer: Peer, role: Role) -> None:
    assert connector(peer, role)["kv_load_failure_policy"] == "recompute"


def test_the_router_forgets_before_an_engine_frees() -> None:
    ttl_s = connector(Peer.NIXL_BIDIRECTIONAL, Role.DECODE)["kv_connector_extra_config"][
        "decoder_kv_blocks_ttl"
    ]
    argv = commands.router_argv(
        Peer.NIXL_BIDIRECTIONAL, ("h", 1), ["http://p0", "http://p1"], ["http://d"]
    )
    assert float(argv[argv.index("--keep-s") + 1]) < ttl_s
    assert argv.count("--prefill") == 2 and argv.count("--decode") == 1
    assert "--keep-s" not in commands.router_argv(Peer.NIXL, ("h", 1), ["p"], ["d"])


def test_mooncakes_store_is_the_storage_host_and_nothing_else() -> None:
    config = commands.pool_config(POOL)
    assert config["global_segment_size"] == 0
    assert config["protocol"] == "tcp"
    assert config["master_server_address"] == "198.18.2.1:50051"
    env = engine(Peer.MOONCAKE_STORE, Role.PREFILL).env
    assert env["MOONCAKE_CONFIG_PATH"] == "/run/m.json"
    assert env["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] == "198.18.2.10"
    assert "MOONCAKE_CONFIG_PATH" not in engine(Peer.NIXL, Role.PREFILL).env
    master = commands.master_argv(Path("/p"), POOL)
    assert master[0] == "/p/mooncake/mooncake_master"
    assert "-rpc_address=198.18.2.1" in master
    pool = commands.pool_argv(Path("/p"), POOL)
    assert "-host=198.18.2.1" in pool and "-global_segment_size=3072 MB" in pool


def test_packages_are_pinned_and_their_folder_names_the_versions(tmp_path: Path) -> None:
    for packages in PACKAGES.values():
        assert all(package.count("==") == 1 for package in packages)
    assert packages_dir(Peer.NIXL, tmp_path) == tmp_path / "peers" / "nixl-1.5.1"
    assert packages_dir(Peer.NIXL, tmp_path) != packages_dir(Peer.MOONCAKE_STORE, tmp_path)


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("a file where a folder should be")
    with pytest.raises(NotInstalled, match=f"^nixl: {tmp_path}/peers: "):
        ensure(Peer.NIXL, tmp_path)


def test_kept_kv_is_the_longest_beginning_once_and_for_a_time() -> None:
    keeping = Keeping(keep_s=10.0)
    keeping.add([1, 2], {"of": "short"}, now_s=0.0)
    keeping.add([1, 2, 3], {"of": "long"}, now_s=1.0)
    keeping.add([7], {"of": "other"}, now_s=1.0)
    assert keeping.take([2, 1], 2.0) is None
    assert keeping.take([1, 2, 3, 4], 2.0) == {"of": "long"}
    assert keeping.take([1, 2, 3, 4], 2.0) == {"of": "short"}
    assert keeping.take([1, 2, 3, 4], 2.0) is None
    assert keeping.take([7, 8], 10.9) == {"of": "other"}
    keeping.add([7], {"of": "late"}, now_s=20.0)
    assert keeping.take([7, 8], 30.0) is None
    keeping.add([7], {"of": "cleared"}, now_s=40.0)
    keeping.clear()
    assert keeping.take([7, 8], 40.0) is None
