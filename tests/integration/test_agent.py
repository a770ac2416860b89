"""Two processes, real NIXL over TCP, everybody well."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from agent_peer import TCP, Bytes, Peer

from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.errors import AgentClosed, AgentSetupError, PeerLost, TransferFailed
from dualpath.transfer.memory import Region

pytestmark = pytest.mark.integration

LOCAL_BYTES = 32 << 20
DEADLINE_S = 20.0  # never reached in a passing test
NUMBER = itertools.count()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    peer = Peer.start(tmp_path_factory.mktemp("peer"), "target/1")
    yield peer
    peer.close()


@pytest.fixture
def region() -> Iterator[Region]:
    with Region(LOCAL_BYTES) as region:
        yield region


@pytest.fixture
def local(region: Region) -> Bytes:
    array: Bytes = np.frombuffer(region.view(), dtype=np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 256, LOCAL_BYTES, dtype=np.uint8)
    return array


@pytest.fixture
async def agent(region: Region, peer: Peer) -> AsyncIterator[PeerAgent]:
    async with PeerAgent(f"tester/{next(NUMBER)}", **TCP) as agent:
        agent.register(region)
        await peer.meet(agent)
        yield agent
        assert agent.outstanding == 0


async def test_done_means_the_peer_has_the_bytes(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes
) -> None:
    """Sizes from one byte to megabytes: at the moment a WRITE is done, the peer's memory holds
    it. (The peer is not asked: its memory is looked into.)"""
    rng = np.random.default_rng(2)
    for size in [
        1,
        7,
        64,
        1000,
        4096,
        65536,
        100_001,
        1 << 20,
        9 << 20,
        *rng.integers(1, 9000, 40),
    ]:
        size = int(size)
        source = int(rng.integers(0, LOCAL_BYTES - size))
        target = int(rng.integers(0, peer.memory.size - size))
        peer.memory[target : target + size] = ~local[source : source + size]
        await agent.write(peer.name, [region.address + source], [peer.at(target)], size, DEADLINE_S)
        got = peer.memory[target : target + size].copy()
        assert (got == local[source : source + size]).all(), f"{size} bytes"


@pytest.mark.parametrize("op", list(Op))
async def test_many_blocks_in_any_order(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes, op: Op
) -> None:
    blocks, size = 300, 50_000
    there = peer.memory[: blocks * size].reshape(blocks, size)
    here = local[: blocks * size].reshape(blocks, size)
    there[:] = np.random.default_rng(3).integers(0, 256, there.shape, dtype=np.uint8)
    order = np.random.default_rng(4).permutation(blocks)
    expected = (here if op is Op.WRITE else there[order]).copy()
    transfer = agent.submit(
        op, peer.name, region.address + np.arange(blocks) * size, peer.at(0) + order * size, size
    )
    await transfer.wait(DEADLINE_S)
    assert transfer.settled.result() is True
    assert ((there[order] if op is Op.WRITE else here) == expected).all()
    counters = agent.counters()
    moved = {"write_bytes": 0.0, "read_bytes": 0.0} | counters
    assert moved[f"{op.value.lower()}_bytes"] == blocks * size
    assert moved["write_bytes"] + moved["read_bytes"] == blocks * size
    assert counters["pieces"] == -(-blocks * size // (4 << 20))


async def test_neighbours_on_both_sides_become_one_descriptor(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes
) -> None:
    size = 4096
    index = np.arange(64)
    await agent.write(
        peer.name, region.address + index * size, peer.at(0) + index * size, size, DEADLINE_S
    )
    assert agent.counters()["descriptors_asked"] == 64
    assert agent.counters()["descriptors_merged"] == 1
    assert (peer.memory[: 64 * size] == local[: 64 * size]).all()


async def test_small_transfer_overtakes_a_huge_one(
    agent: PeerAgent, peer: Peer, region: Region
) -> None:
    order: list[str] = []
    huge = agent.submit(Op.WRITE, peer.name, [region.address], [peer.at(0)], LOCAL_BYTES)
    small = agent.submit(Op.WRITE, peer.name, [region.address], [peer.at(40 << 20)], 4096)
    huge.done.add_done_callback(lambda _: order.append("huge"))
    small.done.add_done_callback(lambda _: order.append("small"))
    await asyncio.gather(huge.wait(DEADLINE_S), small.wait(DEADLINE_S))
    await asyncio.sleep(0)
    assert order == ["small", "huge"]


async def test_both_directions_at_once(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes
) -> None:
    size = 8 << 20
    peer.memory[size : 2 * size] = 77
    await asyncio.gather(
        agent.write(peer.name, [region.address], [peer.at(0)], size, DEADLINE_S),
        agent.read(peer.name, [region.address + size], [peer.at(size)], size, DEADLINE_S),
    )
    assert (peer.memory[:size] == local[:size]).all()
    assert (local[size : 2 * size] == 77).all()


async def test_peer_that_reads_and_writes_here_is_served(
    tmp_path: Path, region: Region, local: Bytes
) -> None:
    """The passive side, as a decode engine is: it only lends its memory."""
    size = 6 << 20
    active = Peer.start(tmp_path, "active/1")
    try:
        async with PeerAgent("passive/1", **TCP) as agent:
            agent.register(region)
            await active.meet(agent)
            for op, offset in (("READ", 0), ("WRITE", size)):
                active.memory[size : 2 * size] = 99
                active.conn.send(("submit", op, "passive/1", offset, region.address + offset, size))
                await active.says("done")
        assert (active.memory[:size] == local[:size]).all()
        assert (local[size : 2 * size] == 99).all()
    finally:
        active.close()


async def test_rate_limit_holds(peer: Peer, region: Region) -> None:
    rate, size = 40e6, 8 << 20
    async with PeerAgent(f"tester/{next(NUMBER)}", rate_bytes_s=rate, **TCP) as agent:
        agent.register(region)
        await peer.meet(agent)
        await agent.write(peer.name, [region.address], [peer.at(0)], 1, DEADLINE_S)
        start = time.monotonic()
        await agent.write(peer.name, [region.address], [peer.at(0)], size, DEADLINE_S)
        took_s = time.monotonic() - start
        # The last piece is free to go when the others are paid for.
        assert agent.counters()["pieces"] - 1 >= size / (rate * 0.02)
        assert took_s >= (size - rate * 0.02) / rate - 0.006


async def test_idle_agent_hardly_wakes(agent: PeerAgent, peer: Peer, region: Region) -> None:
    await agent.write(peer.name, [region.address], [peer.at(0)], 4096, DEADLINE_S)
    await asyncio.sleep(0.05)
    before = agent.counters()["ticks"]
    await asyncio.sleep(0.5)
    assert agent.counters()["ticks"] - before < 50


async def test_what_cannot_be_moved_fails_and_is_settled(
    agent: PeerAgent, peer: Peer, region: Region
) -> None:
    outside = region.address + LOCAL_BYTES
    for local_address, remote_address in [(outside, peer.at(0)), (region.address, 4096)]:
        transfer = agent.submit(Op.WRITE, peer.name, [local_address], [remote_address], 4096)
        with pytest.raises(TransferFailed, match="not accepted"):
            await transfer.wait(DEADLINE_S)
        assert transfer.settled.result() is True
    unknown = agent.submit(Op.WRITE, "nobody", [region.address], [peer.at(0)], 1)
    with pytest.raises(PeerLost, match="nobody is not known"):
        await unknown.wait(DEADLINE_S)
    assert unknown.settled.result() is True
    with pytest.raises(ValueError, match="nothing to move"):
        agent.submit(Op.WRITE, peer.name, [], [], [])
    with pytest.raises(ValueError, match="2 local, 1 remote"):
        agent.submit(Op.WRITE, peer.name, [1, 2], [1], 1)
    with pytest.raises(ValueError, match="positive"):
        agent.submit(Op.WRITE, peer.name, [1], [1], [0])
    await asyncio.sleep(0)
    assert agent.counters()["failures"] == 3


async def test_settings_reach_the_transport(peer: Peer, region: Region, tmp_path: Path) -> None:
    """UCX takes unknown settings without a word, so look at what it really did."""
    options = {"device": "lo", "ports": "23400-23431"}
    limited = Peer.start(tmp_path, "limited/1", **options)
    try:
        async with PeerAgent(f"tester/{next(NUMBER)}", **options) as agent:
            agent.register(region)
            await limited.meet(agent)
            await agent.write(limited.name, [region.address], [limited.at(0)], 4096, DEADLINE_S)
            ours = await asyncio.to_thread(_tcp_ports, "self")
            assert ours["listening"] and all(23400 <= port <= 23431 for port in ours["listening"])
            assert any(23400 <= port <= 23431 for port in ours["connected_to"])
    finally:
        limited.close()


def _tcp_ports(pid: str) -> dict[str, set[int]]:
    """Ports that a process listens on, and remote ports it is connected to, on loopback."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
        except FileNotFoundError:
            continue
        if match:
            inodes.add(match[1])
    found: dict[str, set[int]] = {"listening": set(), "connected_to": set()}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes and fields[1].startswith("0100007F"):
            if fields[3] == "0A":
                found["listening"].add(int(fields[1].split(":")[1], 16))
            else:
                found["connected_to"].add(int(fields[2].split(":")[1], 16))
    return found


async def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(AgentSetupError, match="no-such-nic"):
        PeerAgent("x/1", device="no-such-nic")
    with pytest.raises(ValueError, match="one name"):
        PeerAgent("x/1", transports="tcp,cma")
    with pytest.raises(ValueError, match="rate"):
        PeerAgent("x/2", rate_bytes_s=0)


async def test_memory_copied_without_a_nic(tmp_path: Path, region: Region, local: Bytes) -> None:
    """UCX's own choice between processes of one machine: same contract, other transport."""
    near = Peer.start(tmp_path, "near/1", transports="all")
    try:
        async with PeerAgent(f"tester/{next(NUMBER)}", transports="all") as agent:
            agent.register(region)
            await near.meet(agent)
            agent.set_passive(True)
            size = 5 << 20
            await agent.write(near.name, [region.address], [near.at(0)], size, DEADLINE_S)
            assert (near.memory[:size] == local[:size]).all()
            near.memory[:size] = 5
            await agent.read(near.name, [region.address], [near.at(0)], size, DEADLINE_S)
            assert (local[:size] == 5).all()
            agent.set_passive(False)
            with pytest.raises(RuntimeError, match="passive"):
                agent.set_passive(False)
    finally:
        near.close()


async def test_close_gives_connections_back_whoever_keeps_errors(
    peer: Peer, region: Region
) -> None:
    before = await asyncio.to_thread(_tcp_ports, "self")
    kept = []
    async with PeerAgent(f"tester/{next(NUMBER)}", **TCP) as agent:
        agent.register(region)
        await peer.meet(agent)
        await agent.write(peer.name, [region.address], [peer.at(0)], 4096, DEADLINE_S)
        kept.append(agent.submit(Op.WRITE, peer.name, [region.address], [4096], 1))
        kept.append(agent.submit(Op.READ, peer.name, [region.address], [peer.at(0)], 30 << 20))
        with pytest.raises(TransferFailed) as kept_error:
            await kept[0].wait(DEADLINE_S)
        during = await asyncio.to_thread(_tcp_ports, "self")
        assert during["listening"] > before["listening"]
    assert kept_error.value and all(transfer.settled.done() for transfer in kept)
    after = await asyncio.to_thread(_tcp_ports, "self")
    assert after["listening"] == before["listening"]
    late = agent.submit(Op.WRITE, peer.name, [region.address], [peer.at(0)], 1)
    with pytest.raises(AgentClosed):
        await late.wait(DEADLINE_S)
    await agent.close()


async def test_other_threads_are_refused(agent: PeerAgent, peer: Peer) -> None:
    with pytest.raises(RuntimeError, match="another thread"):
        await asyncio.to_thread(agent.remove_peer, peer.name)
