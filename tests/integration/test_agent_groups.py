"""Small transfers that wait in a row go out as one request, and still end one by one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from agent_peer import TCP, Bytes, Peer

from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.errors import PeerLost, TransferFailed, TransferTimeout
from dualpath.transfer.memory import Region

pytestmark = pytest.mark.integration

LOCAL_BYTES = 32 << 20
DEADLINE_S = 30.0  # never reached in a passing test
NUMBER = itertools.count()
SIZE = 10_000


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    peer = Peer.start(tmp_path_factory.mktemp("grouped"), "grouped/1")
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
    async with PeerAgent(f"groups/{next(NUMBER)}", **TCP) as agent:
        agent.register(region)
        await peer.meet(agent)
        await agent.write(peer.name, [region.address], [peer.at(0)], 1, DEADLINE_S)
        yield agent
        assert agent.outstanding == 0


@pytest.mark.parametrize("op", list(Op))
async def test_many_small_transfers_are_few_requests(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes, op: Op
) -> None:
    count = 60
    there = peer.memory[: count * SIZE].reshape(count, SIZE)
    here = local[: count * SIZE].reshape(count, SIZE)
    there[:] = np.random.default_rng(3).integers(0, 256, there.shape, dtype=np.uint8)
    order = np.random.default_rng(4).permutation(count)
    expected = (here if op is Op.WRITE else there[order]).copy()
    before = agent.counters()["pieces"]
    transfers = [
        agent.submit(op, peer.name, [region.address + i * SIZE], [peer.at(int(j) * SIZE)], SIZE)
        for i, j in enumerate(order)
    ]
    await asyncio.gather(*(transfer.wait(DEADLINE_S) for transfer in transfers))
    assert all(transfer.settled.result() is True for transfer in transfers)
    assert ((there[order] if op is Op.WRITE else here) == expected).all()
    assert agent.counters()["pieces"] - before == 1
    assert agent.counters()["transfers"] == count + 1


async def test_groups_keep_to_the_size_of_a_piece_and_to_one_direction(
    agent: PeerAgent, peer: Peer, region: Region
) -> None:
    size = 1 << 20
    before = agent.counters()["pieces"]
    ops = [Op.WRITE] * 6 + [Op.READ] * 3 + [Op.WRITE] * 2
    transfers = [
        agent.submit(op, peer.name, [region.address + i * size], [peer.at(i * size)], size)
        for i, op in enumerate(ops)
    ]
    await asyncio.gather(*(transfer.wait(DEADLINE_S) for transfer in transfers))
    assert agent.counters()["pieces"] - before == 4  # 4 and 2 writes, 3 reads, 2 writes


@pytest.mark.parametrize("op", list(Op))
async def test_what_is_wrong_with_one_is_not_the_others_fault(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes, op: Op
) -> None:
    peer.memory[: 3 * SIZE] = 5
    expected = peer.memory[: 3 * SIZE].copy() if op is Op.READ else local[: 3 * SIZE].copy()
    outside = peer.at(peer.memory.size)
    transfers = [
        agent.submit(op, peer.name, [region.address + i * SIZE], [address], SIZE)
        for i, address in enumerate([peer.at(0), outside, peer.at(2 * SIZE)])
    ]
    results = await asyncio.gather(
        *(transfer.wait(DEADLINE_S) for transfer in transfers), return_exceptions=True
    )
    assert isinstance(results[1], TransferFailed)
    assert results[0] is None and results[2] is None
    assert all(transfer.settled.result() is True for transfer in transfers)
    got = local[: 3 * SIZE] if op is Op.READ else peer.memory[: 3 * SIZE]
    for part in (slice(0, SIZE), slice(2 * SIZE, 3 * SIZE)):
        assert (got[part] == expected[part]).all()


@pytest.mark.parametrize("op", list(Op))
async def test_one_that_is_given_up_settles_with_its_group(
    agent: PeerAgent, peer: Peer, region: Region, local: Bytes, op: Op
) -> None:
    peer.memory[: 3 * SIZE] = 9
    expected = peer.memory[: 3 * SIZE].copy() if op is Op.READ else local[: 3 * SIZE].copy()
    peer.stop()
    try:
        transfers = [
            agent.submit(op, peer.name, [region.address + i * SIZE], [peer.at(i * SIZE)], SIZE)
            for i in range(3)
        ]
        with pytest.raises(TransferTimeout):
            await transfers[1].wait(0.1)
        assert not transfers[1].settled.done()
        assert not transfers[0].done.done()
    finally:
        peer.resume()
    await asyncio.gather(transfers[0].wait(DEADLINE_S), transfers[2].wait(DEADLINE_S))
    assert await asyncio.wait_for(asyncio.shield(transfers[1].settled), DEADLINE_S) is True
    got = local[: 3 * SIZE] if op is Op.READ else peer.memory[: 3 * SIZE]
    for part in (slice(0, SIZE), slice(2 * SIZE, 3 * SIZE)):
        assert (got[part] == expected[part]).all()


async def test_a_long_read_that_is_refused_ends_and_starts_no_more_pieces(
    agent: PeerAgent, peer: Peer, region: Region
) -> None:
    """More pieces than are under way at a time: those that wait must go with it."""
    size = 20 << 20
    transfer = agent.submit(Op.READ, peer.name, [region.address], [4096], size)
    with pytest.raises(TransferFailed, match="did not serve a read"):
        await transfer.wait(DEADLINE_S)
    assert await asyncio.wait_for(asyncio.shield(transfer.settled), DEADLINE_S) is True
    await agent.write(peer.name, [region.address], [peer.at(0)], 4096, DEADLINE_S)


async def test_a_killed_peer_fails_all_of_a_group(
    region: Region, tmp_path_factory: pytest.TempPathFactory
) -> None:
    victim = Peer.start(tmp_path_factory.mktemp("victim"), "victim/1")
    try:
        async with PeerAgent(f"groups/{next(NUMBER)}", **TCP) as agent:
            agent.register(region)
            await victim.meet(agent)
            await agent.write(victim.name, [region.address], [victim.at(0)], 1, DEADLINE_S)
            victim.stop()
            transfers = [
                agent.submit(
                    Op.WRITE, victim.name, [region.address + i * SIZE], [victim.at(i * SIZE)], SIZE
                )
                for i in range(5)
            ]
            await asyncio.sleep(0.05)
            victim.kill()
            results = await asyncio.gather(
                *(transfer.wait(DEADLINE_S) for transfer in transfers), return_exceptions=True
            )
            assert all(isinstance(result, PeerLost) for result in results)
            settled = [asyncio.shield(transfer.settled) for transfer in transfers]
            assert await asyncio.wait_for(asyncio.gather(*settled), DEADLINE_S) == [False] * 5
    finally:
        victim.close()
