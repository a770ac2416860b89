"""Peers that stop, die, come back, or never were: what ends when, and what is still touched."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from agent_peer import TCP, Bytes, Peer

from dualpath.transfer.agent import Op, PeerAgent, Transfer
from dualpath.transfer.errors import AgentClosed, PeerLost, TransferTimeout
from dualpath.transfer.memory import Region
from dualpath.transfer.slots import SlotPool

pytestmark = pytest.mark.integration

LOCAL_BYTES = 48 << 20
BIG_BYTES = 24 << 20  # more than socket buffers hold: it cannot end while the peer is stopped
DEADLINE_S = 20.0  # never reached in a passing test
NUMBER = itertools.count()


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Peer]]:
    """Peers to be ill-treated, started together because starting is what takes long."""
    names = [f"peer{i}/1" for i in range(11)]
    peers = Peer.start_many(tmp_path_factory.mktemp("peers"), names)
    waiting = iter(peers)
    yield lambda: next(waiting)
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(spare: Callable[[], Peer]) -> Peer:
    return spare()


@pytest.fixture
def region() -> Iterator[Region]:
    with Region(LOCAL_BYTES) as region:
        yield region


@pytest.fixture
def local(region: Region) -> Bytes:
    array: Bytes = np.frombuffer(region.view(), dtype=np.uint8)
    array[:] = 3
    return array


@pytest.fixture
async def agent(region: Region) -> AsyncIterator[PeerAgent]:
    async with PeerAgent(f"tester/{next(NUMBER)}", **TCP) as agent:
        agent.register(region)
        yield agent


async def connect(agent: PeerAgent, peer: Peer, region: Region) -> None:
    await peer.meet(agent)
    await agent.write(peer.name, [region.address], [peer.at(0)], 1, DEADLINE_S)


def submit(agent: PeerAgent, op: Op, peer: Peer, region: Region) -> Transfer:
    return agent.submit(op, peer.name, [region.address], [peer.at(0)], BIG_BYTES)


async def under_way(agent: PeerAgent, pieces: float) -> None:
    """Wait until so many pieces were handed to the NIC."""
    end = time.monotonic() + DEADLINE_S
    while agent.counters()["pieces"] < pieces:
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("op", list(Op))
async def test_stopped_peer_times_out_and_settles_when_it_goes_on(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes, op: Op
) -> None:
    await connect(agent, peer, region)
    peer.memory[:] = 8
    pool = SlotPool(1, BIG_BYTES, "buffer")
    lease = await pool.allocate("request", 1, DEADLINE_S)
    peer.stop()
    transfer = submit(agent, op, peer, region)
    token = lease.begin_io()
    transfer.settled.add_done_callback(lambda _: token.end())
    with pytest.raises(TransferTimeout, match=r"not done in 0\.3 s"):
        await transfer.wait(0.3)
    lease.release()
    assert pool.draining == 1 and agent.outstanding == 1
    posted = agent.counters()["pieces"]
    peer.resume()
    async with asyncio.timeout(DEADLINE_S):
        assert await transfer.settled is True
    await asyncio.sleep(0)
    pool.assert_idle()
    assert agent.outstanding == 0
    # What was not handed over before the deadline never was.
    assert agent.counters()["pieces"] == posted
    assert agent.counters()["timeouts"] == 1
    # And the peer is as good as before.
    transfer = submit(agent, op, peer, region)
    await transfer.wait(DEADLINE_S)
    assert (local[:BIG_BYTES] == peer.memory[:BIG_BYTES]).all()


@pytest.mark.parametrize("op", list(Op))
async def test_killed_peer_fails_at_once_others_go_on_and_it_may_return(
    agent: PeerAgent,
    spare: Callable[[], Peer],
    tmp_path: Path,
    region: Region,
    local: Bytes,
    op: Op,
) -> None:
    victim = Peer.start(tmp_path, "victim/1")
    healthy = spare() if op is Op.WRITE else victim
    try:
        await connect(agent, victim, region)
        if healthy is not victim:
            await connect(agent, healthy, region)
        before = agent.counters()["pieces"]
        transfer = submit(agent, op, victim, region)
        await under_way(agent, before + 1)
        victim.kill()
        start = time.monotonic()
        with pytest.raises(PeerLost, match="victim/1 broke"):
            await transfer.wait(DEADLINE_S)
        assert time.monotonic() - start < DEADLINE_S / 4  # by the connection, not the deadline
        if op is Op.READ:
            # For all this side knows, the peer may be alive and write later.
            await asyncio.sleep(0.3)
            assert not transfer.settled.done()
            agent.remove_peer(victim.name)
        async with asyncio.timeout(DEADLINE_S):
            assert await transfer.settled is False
        # Settled means settled: nothing lands here any more.
        mark = local[:BIG_BYTES].copy()
        await agent.drain(0.1)
        assert (local[:BIG_BYTES] == mark).all()
        with pytest.raises(PeerLost):
            await agent.write(victim.name, [region.address], [victim.at(0)], 1, DEADLINE_S)
        if healthy is not victim:
            await agent.write(
                healthy.name, [region.address], [healthy.at(0)], BIG_BYTES, DEADLINE_S
            )
            assert (healthy.memory[:BIG_BYTES] == local[:BIG_BYTES]).all()
        # Same name, new process, new metadata, with and without a word of goodbye.
        victim.close()
        victim = Peer.start(tmp_path, "victim/1")
        await victim.meet(agent)
        await agent.write(victim.name, [region.address], [victim.at(0)], BIG_BYTES, DEADLINE_S)
        assert (victim.memory[:BIG_BYTES] == local[:BIG_BYTES]).all()
        assert agent.outstanding == 0
    finally:
        victim.close()


async def test_removed_peer_fails_its_transfers_now_and_settles_them_later(
    agent: PeerAgent, peer: Peer, region: Region
) -> None:
    await connect(agent, peer, region)
    peer.stop()
    transfers = [submit(agent, Op.READ, peer, region) for _ in range(2)]
    await under_way(agent, 3)
    agent.remove_peer(peer.name)
    agent.remove_peer(peer.name)
    for transfer in transfers:
        with pytest.raises(PeerLost, match="was removed"):
            await transfer.wait(DEADLINE_S)
    await asyncio.sleep(0.1)
    assert not any(transfer.settled.done() for transfer in transfers)
    peer.resume()
    async with asyncio.timeout(DEADLINE_S):
        assert await transfers[0].settled is True
        assert await transfers[1].settled is True
    await connect(agent, peer, region)


async def test_peer_that_is_stopped_holds_up_nobody_else(
    agent: PeerAgent, peer: Peer, spare: Callable[[], Peer], region: Region, local: Bytes
) -> None:
    other = spare()
    await connect(agent, peer, region)
    await connect(agent, other, region)
    peer.stop()
    stuck = submit(agent, Op.WRITE, peer, region)
    await agent.write(other.name, [region.address], [other.at(0)], BIG_BYTES, DEADLINE_S)
    assert (other.memory[:BIG_BYTES] == local[:BIG_BYTES]).all()
    assert not stuck.done.done()
    peer.resume()
    await stuck.wait(DEADLINE_S)


async def test_peer_cut_off_for_too_long_is_lost_and_met_again(
    peer: Peer, region: Region, local: Bytes
) -> None:
    """The connection breaks although both processes live, as when a cable is pulled."""
    async with PeerAgent("cut/1", user_timeout_s=1.0, **TCP) as agent:
        agent.register(region)
        await connect(agent, peer, region)
        peer.memory[:] = 8
        peer.stop()
        read = agent.submit(Op.READ, peer.name, [region.address + BIG_BYTES], [peer.at(0)], 4096)
        write = submit(agent, Op.WRITE, peer, region)
        for transfer in (write, read):
            with pytest.raises(PeerLost, match="broke"):
                await transfer.wait(DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert await write.settled is False
        # The peer has the request in its hands: only it can say that it will not write any more.
        assert not read.settled.done()
        peer.resume()
        async with asyncio.timeout(DEADLINE_S):
            assert await read.settled is True
        await agent.write(peer.name, [region.address], [peer.at(0)], BIG_BYTES, DEADLINE_S)
        await agent.read(peer.name, [region.address], [peer.at(0)], BIG_BYTES, DEADLINE_S)
        assert (peer.memory[:BIG_BYTES] == local[:BIG_BYTES]).all()
        assert agent.counters()["connections_lost"] == 1


async def test_cancelled_waiter_gives_up_what_is_not_under_way(
    agent: PeerAgent, peer: Peer, region: Region
) -> None:
    await connect(agent, peer, region)
    peer.stop()
    transfer = submit(agent, Op.WRITE, peer, region)
    waiter = asyncio.create_task(transfer.wait(DEADLINE_S))
    await under_way(agent, 2)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert transfer.done.done() and not transfer.settled.done()
    # Behind it in the window and never started: over at once.
    late = submit(agent, Op.WRITE, peer, region)
    with pytest.raises(TransferTimeout):
        await late.wait(0.05)
    assert late.settled.result() is True
    peer.resume()
    async with asyncio.timeout(DEADLINE_S):
        assert await transfer.settled is True
    assert agent.counters()["write_bytes"] < 1 + BIG_BYTES


async def test_after_close_nothing_lands_here(peer: Peer, region: Region, local: Bytes) -> None:
    peer.memory[:] = 8
    async with PeerAgent("closing/1", **TCP) as agent:
        agent.register(region)
        await connect(agent, peer, region)
        peer.stop()
        transfer = submit(agent, Op.READ, peer, region)
        await under_way(agent, 2)
        await agent.close(grace_s=0.05)
    with pytest.raises(AgentClosed):
        await transfer.wait(DEADLINE_S)
    assert transfer.settled.result() is False
    assert agent.outstanding == 0
    mark = local.copy()
    peer.resume()
    await asyncio.sleep(0.2)
    assert (local == mark).all()
    # The peer survives it too.
    async with PeerAgent("closing/2", **TCP) as agent:
        agent.register(region)
        await connect(agent, peer, region)
        await agent.read(peer.name, [region.address], [peer.at(0)], BIG_BYTES, DEADLINE_S)
        assert (local[:BIG_BYTES] == peer.memory[:BIG_BYTES]).all()


async def test_reader_that_dies_does_not_take_the_owner_with_it(
    agent: PeerAgent, peer: Peer, tmp_path: Path, region: Region, local: Bytes
) -> None:
    """With UCX's own READ over TCP, the owner aborts when it finds the requests of a dead
    reader."""
    await connect(agent, peer, region)
    reader = Peer.start(tmp_path, "reader/1")
    try:
        for one, other in ((peer, reader), (reader, peer)):
            one.conn.send(("add", other.name, other.metadata))
            await one.says("added")
        read = ("submit", "READ", peer.name, 0, peer.at(0), 1 << 20)
        reader.conn.send(read)
        await reader.says("done")
        peer.stop()
        for _ in range(8):
            reader.conn.send(read)
        await asyncio.sleep(0.1)
    finally:
        reader.close()
    peer.resume()
    await agent.write(peer.name, [region.address], [peer.at(0)], BIG_BYTES, DEADLINE_S)
    await asyncio.sleep(0.2)
    await agent.read(peer.name, [region.address], [peer.at(0)], BIG_BYTES, DEADLINE_S)
    assert (local[:BIG_BYTES] == peer.memory[:BIG_BYTES]).all()
    assert peer.process.is_alive()


async def test_dead_peers_last_bytes_land_before_drain_returns(
    agent: PeerAgent, tmp_path: Path, region: Region, local: Bytes
) -> None:
    """The danger that ``drain`` is for: a write from a process that no longer exists."""
    writer = Peer.start(tmp_path, "writer/1")
    try:
        writer.memory[:] = 9
        await writer.meet(agent)
        warm_up = ("submit", "WRITE", agent.name, 0, region.address, 1)
        writer.conn.send(warm_up)
        await writer.says("done")
        local[:] = 3
        writer.conn.send(("submit", "WRITE", agent.name, 0, region.address, 256 << 10))
        # On purpose without the loop: this side does not serve its connections meanwhile.
        time.sleep(0.3)  # noqa: ASYNC251
        assert not writer.conn.poll(0)
        writer.kill()
        assert (local == 3).all()
        await agent.drain()
        landed = int((local == 9).sum())
        assert landed > 0, "nothing was in flight, so nothing was shown"
        mark = local.copy()
        await asyncio.sleep(0.2)
        await agent.drain(0.05)
        assert (local == mark).all()
    finally:
        writer.close()


async def test_stale_or_broken_metadata_fails_transfers_only(
    agent: PeerAgent, peer: Peer, tmp_path: Path, region: Region
) -> None:
    gone = Peer.start(tmp_path, "gone/1")
    gone.close()
    agent.add_peer(gone.name, gone.metadata)
    agent.add_peer("somebody else", peer.metadata)
    agent.add_peer("garbage", b"not metadata")
    agent.add_peer("empty", b"")
    # NIXL may keep what it could read, and the name with it: not one that is used below.
    agent.add_peer("cut", gone.metadata[: len(gone.metadata) // 2])
    for name in (gone.name, "somebody else", "garbage", "empty", "cut"):
        transfer = agent.submit(Op.WRITE, name, [region.address], [peer.at(0)], 4096)
        with pytest.raises(PeerLost):
            await transfer.wait(DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await transfer.settled
    await connect(agent, peer, region)
    assert agent.outstanding == 0
