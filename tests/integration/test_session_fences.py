"""Sessions over copy engine ``cnic`` (a loop over TCP here), and beside a device that runs behind.

The made-up device has launched its work when a session is told, and writes its KV later: nothing
may be copied or pushed before, and nothing may be written over what it still reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from test_sessions import LAYOUT, ROOT, WAIT_S, Pair, by_block, cluster, running

from dualpath.blocks import chain_keys
from dualpath.control.messages import GoDecode, PrefillDone, TurnDurable
from dualpath.transfer.decode import DecodeSession, PersistBlock
from dualpath.transfer.exports import PushBlock
from dualpath.transfer.loads import DeviceUse, LayerLoad, LoadBlock
from dualpath.transfer.prefill import PrefillSession

pytestmark = pytest.mark.integration

SOON_S = 0.1


class Gate:
    """Work of the device that is over when the test says so."""

    def __init__(self) -> None:
        self.open = False

    def reached(self) -> bool:
        return self.open


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    config = cluster(tmp_path)
    engine = msgspec.structs.replace(config.engine, copy="cnic")
    async with running(msgspec.structs.replace(config, engine=engine), tmp_path) as started:
        yield started
        for side in (started.pe, started.de):
            assert side.manager._services.copy_engine.name == "cnic"


@pytest.mark.parametrize("pe_reads", [0, 3, 6])
async def test_bytes_survive_the_round_trip_through_the_loop(pair: Pair, pe_reads: int) -> None:
    tokens = list(range(64 * 6 + 17))
    pe_first, de_first = await pair.turn("first", tokens, 0, 0, answer=list(range(60)))
    assert by_block(pe_first) == by_block(de_first)
    again = tokens + list(range(60)) + [9] * 70
    pe_second, de_second = await pair.turn("second", again, 6, pe_reads, answer=[1] * 90)
    assert by_block(pe_second)[:12] == by_block(pe_first)[:12]
    assert by_block(pe_second) == by_block(de_second)


async def test_nothing_moves_before_the_device_has_got_there(pair: Pair) -> None:
    tokens = list(range(64 * 2))
    answer = list(range(64))
    keys = chain_keys(ROOT, tokens, 64)
    await pair.front.open("r", keys, len(tokens), 0, 0)
    prefill = pair.pe.manager.session("r", 0)
    decode = pair.de.manager.session("r", 0)
    assert isinstance(prefill, PrefillSession)
    assert isinstance(decode, DecodeSession)
    pe_blocks, de_blocks = [3, 4, 5, 6], [10, 11, 12, 13]

    # P4 / D4: launched, not computed.
    computing, use = Gate(), DeviceUse()
    pair.pe.fill(pe_blocks)
    pair.pe.manager.call(partial(prefill.begin, 0))
    blocks = [PushBlock(0, (3, 4)), PushBlock(1, (5, 6))]
    for layer in range(LAYOUT.num_layers):
        use.enter()
        pair.pe.manager.call(partial(prefill.push_layer, layer, blocks, use, [computing]))
    pair.pe.manager.call(partial(prefill.vllm_finished, True))
    await asyncio.sleep(SOON_S)
    assert pair.front.inbox("pe0", PrefillDone).empty()
    assert not use.idle
    pair.pe.fill(pe_blocks)
    computed = pair.pe.content(pe_blocks)
    computing.open = True
    done = await pair.front.expect("pe0", PrefillDone)
    assert isinstance(done, PrefillDone)
    assert not done.error

    # P5 / D5: earlier work still reads the blocks it goes to.
    pair.front.send("de0", GoDecode(rid="r", attempt=0, good_blocks=0))
    reading = Gate()
    pair.de.fill(de_blocks)
    before = pair.de.content(de_blocks)
    load = LayerLoad(
        "r",
        (LoadBlock(0, (10, 11)), LoadBlock(1, (12, 13))),
        LAYOUT.num_layers,
        after=[reading],
    )
    loading = DeviceUse()
    loading.enter()
    pair.de.manager.call(partial(decode.load, load, loading))
    await asyncio.sleep(SOON_S)
    assert pair.de.content(de_blocks) == before
    reading.open = True
    await asyncio.to_thread(load.wait, LAYOUT.num_layers - 1, WAIT_S)
    assert pair.de.content(de_blocks) == computed

    # Persisting: the last token of the block is still being written.
    writing, persisting = Gate(), DeviceUse()
    pair.de.fill([20, 21])
    persisting.enter()
    block = PersistBlock(2, (20, 21), tuple(answer))
    pair.de.manager.call(partial(decode.persist, "r", [block], persisting, [writing]))
    pair.de.manager.call(decode.vllm_finished)
    await asyncio.sleep(SOON_S)
    assert not persisting.idle
    assert pair.front.inbox("de0", TurnDurable).empty()
    pair.de.fill([20, 21])
    decoded = pair.de.content([20, 21])
    writing.open = True
    durable = await pair.front.expect("de0", TurnDurable)
    assert isinstance(durable, TurnDurable)
    assert durable.skipped == 0
    await pair.front.close("r")

    # What the next turn hits is what was computed and decoded, not what lay there before.
    pe_next, _ = await pair.turn("next", tokens + answer + [7] * 10, 3, 3, answer=[1, 2])
    half = len(pe_next) // LAYOUT.num_layers
    for layer in range(LAYOUT.num_layers):
        got = pe_next[layer * half :][:6]
        assert got[:4] == computed[layer * 4 :][:4]
        assert got[4:] == decoded[layer * 2 :][:2]
