"""A preempted answer's blocks come back from the store, without a model (see ``test_sessions``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from test_sessions import CACHE_BLOCKS, LAYOUT, ROOT, WAIT_S, Pair, cluster, running

from dualpath.blocks import chain_keys
from dualpath.config import Seconds
from dualpath.control.messages import GoDecode, PrefillDone, TurnDurable
from dualpath.storage import maintenance
from dualpath.transfer.decode import DecodeSession, PersistBlock
from dualpath.transfer.loads import DeviceUse

pytestmark = pytest.mark.integration
pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

PROMPT = list(range(64 * 3 + 20))
WHOLE = PROMPT + [7] * (64 * 2)  # blocks 3 and 4 are completed by decoding
KEYS = chain_keys(ROOT, WHOLE, 64)
AT = [CACHE_BLOCKS - 1 - block for block in range(10)]  # engine blocks of the five
AGAIN = list(range(10))


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    config = cluster(tmp_path)
    timeouts = msgspec.structs.replace(config.timeouts, layer=Seconds(0.5))
    async with running(msgspec.structs.replace(config, timeouts=timeouts), tmp_path) as started:
        yield started


async def decoding(pair: Pair) -> DecodeSession:
    """A session whose five blocks are in the cache, and durable but for the tail."""
    front, pe, de = pair.front, pair.pe, pair.de
    prompt_at = AGAIN[: 2 * LAYOUT.blocks_for_tokens(len(PROMPT))]
    await front.open("r", KEYS[:3], len(PROMPT), 0, 0)
    pe.fill(prompt_at)
    await pe.push("r", prompt_at, 0, 0)
    await front.expect("pe0", PrefillDone)
    front.send("de0", GoDecode(rid="r", attempt=0, good_blocks=0))
    await de.load("r", AT[: len(prompt_at)])
    session = await de.session("r")
    assert isinstance(session, DecodeSession)
    de.fill(AT[6:])
    use = DeviceUse()
    use.enter(2)
    blocks = [
        PersistBlock(i, tuple(AT[2 * i : 2 * i + 2]), tuple(WHOLE[64 * i : 64 * i + 64]))
        for i in (3, 4)
    ]
    de.manager.call(partial(session.persist, "r", blocks, use))
    async with asyncio.timeout(WAIT_S):
        while not set(KEYS) <= front.published:
            await front.reported_buffer("de0")
    return session


async def restored(pair: Pair, session: DecodeSession, tokens: int = len(WHOLE)) -> int:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, int]] = loop.create_future()

    def told(request_id: str, blocks: int) -> None:
        loop.call_soon_threadsafe(answer.set_result, (request_id, blocks))

    pair.de.manager.call(partial(session.restore, "r", tokens, told))
    async with asyncio.timeout(WAIT_S):
        name, blocks = await answer
    assert name == "r"
    return blocks


async def end(pair: Pair, session: DecodeSession) -> None:
    pair.de.manager.call(session.vllm_finished)
    await pair.front.expect("de0", TurnDurable)
    await pair.front.close("r")


async def everything_evicted(store: Path) -> None:
    """Until nothing is left: a session's pins go in their own thread, after it said ``Closed``."""
    async with asyncio.timeout(WAIT_S):
        while maintenance.gc(store, 0).kept_bytes:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_the_bytes_come_back_as_they_were(pair: Pair) -> None:
    session = await decoding(pair)
    before = pair.de.content(AT)
    # Again and again: an answer may be preempted many times.
    for _ in range(2):
        pair.de.fill(AT)
        assert await restored(pair, session) == 5
        await pair.de.load("r", AGAIN)
        assert pair.de.content(AGAIN) == before
        assert (await pair.front.reported_buffer("de0")) == 0  # given back by the load
    assert await restored(pair, session, tokens=64 * 4 + 63) == 4
    await end(pair, session)  # not loaded: given back by the end


async def test_what_gc_has_removed_costs_computing_again_and_the_index_hears_of_it(
    pair: Pair, tmp_path: Path
) -> None:
    session = await decoding(pair)
    await end(pair, session)
    await everything_evicted(tmp_path / "store")
    # The front's index still has all of them.
    for rid, pe_reads in (("pe", 5), ("de", 0)):
        pair.front.dropped.clear()
        assert await pair.front.open(rid, KEYS, len(WHOLE), 5, pe_reads) == (0, 0)
        await pair.front.close(rid)
        assert pair.front.dropped == {KEYS[0]}


async def test_what_is_not_stored_any_more_ends_it(pair: Pair, tmp_path: Path) -> None:
    session = await decoding(pair)
    (file,) = (tmp_path / "store").rglob(f"{KEYS[2].hex()}.*")
    file.unlink()
    assert await restored(pair, session) == 2
    await pair.de.load("r", AGAIN[:4])
    assert pair.de.content(AGAIN[:4]) == pair.de.content(AT[:4])
    await end(pair, session)


async def test_a_full_buffer_means_computing_again(pair: Pair) -> None:
    """Nothing waits for ever, and nothing of the attempt stays behind."""
    session = await decoding(pair)
    other = list(range(5000, 5000 + 64 * 16))
    await pair.front.open("other", chain_keys(ROOT, other, 64), len(other), 0, 0)
    assert await restored(pair, session) == 0
    await pair.front.close("other")
    assert await restored(pair, session) == 5
    await end(pair, session)


async def test_closed_meanwhile(pair: Pair) -> None:
    session = await decoding(pair)
    asking = asyncio.create_task(restored(pair, session))
    await asyncio.sleep(0)
    await pair.front.close("r")
    assert await asking in (0, 5)
    assert await restored(pair, session) == 0
