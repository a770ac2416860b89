"""Mooncake's store on the lab's storage host: it comes up, and every byte of it passes a SNIC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dualpath.config import ConfigError
from dualpath.lab.names import CNIC, LOOPBACK, SNIC, STORAGE, Net
from dualpath.lab.network import check_machine, lab_network
from dualpath.lab.peers import packages
from dualpath.lab.peers.cluster import PeerPlan, peer_store
from dualpath.lab.peers.commands import MASTER_PORT
from dualpath.lab.peers.kinds import Peer
from dualpath.lab.spec import LabSpec

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.full]

SIZE = 4 << 20
CLIENT = """
import sys
sys.path.insert(0, sys.argv[1])
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(sys.argv[2], "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[3]) == 0
value = bytes(range(256)) * (int(sys.argv[4]) // 256)
assert store.put("key", value) == 0
assert store.get("key") == value
store.close()
"""


@pytest.mark.timeout(600)
async def test_a_node_reaches_the_store_over_its_snic_alone(tmp_path: Path) -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        folder = packages.ensure(Peer.MOONCAKE_STORE)
    except packages.NotInstalled as error:
        pytest.skip(str(error))
    spec = LabSpec(model="org/model")
    with lab_network(spec, tmp_path / "run") as network:
        async with peer_store(PeerPlan(Peer.MOONCAKE_STORE, network, folder)):
            before = network.nic_bytes()
            master = f"{network.address(STORAGE, Net.STORAGE)}:{MASTER_PORT}"
            own = network.address("de0", Net.STORAGE)
            argv = [sys.executable, "-c", CLIENT, str(folder), own, master, str(SIZE)]
            client = network.command("de0", argv)
            await asyncio.to_thread(subprocess.run, client, check=True, timeout=120)
            after = network.nic_bytes()
    node = {nic: after["de0"][nic].since(before["de0"][nic]) for nic in (SNIC, CNIC, LOOPBACK)}
    assert SIZE <= node[SNIC].tx_payload_bytes < 1.05 * SIZE
    assert SIZE <= node[SNIC].rx_payload_bytes < 1.05 * SIZE
    assert node[CNIC].tx_bytes + node[CNIC].rx_bytes < SIZE / 100
    assert node[LOOPBACK].tx_bytes < SIZE / 100
