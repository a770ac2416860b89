"""Both read paths between two traffic managers, real NIXL and a real store, no model.

The "model" here writes random bytes into the prefill engine's cache; what must hold is that
exactly those bytes come out of the store and arrive in both caches, and that every ledger is
empty afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dualpath.blocks import BlockLayout, KeyRoot, chain_keys
from dualpath.config import ClusterConfig, Role, Size, parse
from dualpath.control.channel import Channel
from dualpath.control.messages import (
    Allocated,
    Close,
    Closed,
    Dropped,
    EngineStats,
    GoDecode,
    Hello,
    Message,
    OpenDecode,
    Opened,
    OpenPrefill,
    PeerUp,
    PrefillDone,
    Published,
    Refused,
    Report,
    SessionSpec,
    ToFront,
    TurnDurable,
    Welcome,
)
from dualpath.engine.assemble import EngineIdentity, traffic_manager
from dualpath.transfer.decode import DecodeSession, PersistBlock
from dualpath.transfer.hbm import DeviceCache
from dualpath.transfer.loads import DeviceUse, LayerLoad, LoadBlock
from dualpath.transfer.manager import HandshakeRefused, TrafficManager
from dualpath.transfer.memory import Region
from dualpath.transfer.prefill import PrefillSession, PushBlock

pytestmark = pytest.mark.integration
pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

LAYOUT = BlockLayout(num_layers=3, block_tokens=64, engine_block_tokens=32, token_layer_bytes=24)
CACHE_BLOCKS = 64
ROOT = KeyRoot(
    model="m", dtype="x", num_layers=3, block_tokens=64, token_layer_bytes=24, layout_id="l"
).digest()
WAIT_S = 10.0


class Engine:
    """A traffic manager with a pretend device cache."""

    def __init__(self, cluster: ClusterConfig, role: Role, control: str, run_dir: Path) -> None:
        size = CACHE_BLOCKS * LAYOUT.engine_layer_block_bytes
        self.memory = [Region(size) for _ in range(LAYOUT.num_layers)]
        cache = DeviceCache(
            tuple(region.address for region in self.memory),
            LAYOUT.engine_layer_block_bytes,
            CACHE_BLOCKS,
            LAYOUT,
        )
        self.manager: TrafficManager = traffic_manager(
            cluster,
            EngineIdentity(
                role=role, rank=0, incarnation=os.urandom(4).hex(), pid=os.getpid(), host_id="h",
                http_url="http://127.0.0.1:1", model="m", layout_id="l", dtype="x",
                max_batched_tokens=2048,
            ),
            cache,
            keepalive=self.memory,
            control=control,
            run_dir=run_dir,
            live_stats=dict,
        )  # fmt: skip

    def fill(self, engine_blocks: list[int]) -> None:
        size = LAYOUT.engine_layer_block_bytes
        for region in self.memory:
            for block in engine_blocks:
                region.view(block * size, size)[:] = os.urandom(size)

    def content(self, engine_blocks: list[int]) -> list[bytes]:
        size = LAYOUT.engine_layer_block_bytes
        return [
            bytes(region.view(block * size, size))
            for region in self.memory
            for block in engine_blocks
        ]

    async def session(self, rid: str) -> PrefillSession | DecodeSession:
        session = self.manager.session(rid, 0)
        assert session is not None
        return session

    async def load(self, rid: str, engine_blocks: list[int]) -> LayerLoad:
        session = await self.session(rid)
        blocks = tuple(
            LoadBlock(index, tuple(engine_blocks[index * 2 : index * 2 + 2]))
            for index in range((len(engine_blocks) + 1) // 2)
        )
        load, use = LayerLoad(rid, blocks, LAYOUT.num_layers), DeviceUse()
        use.enter()
        self.manager.call(partial(session.load, load, use))
        await asyncio.to_thread(load.wait, LAYOUT.num_layers - 1, WAIT_S)
        assert await asyncio.to_thread(use.wait_idle, WAIT_S)
        return load

    async def push(self, rid: str, engine_blocks: list[int], first: int, hit: int) -> None:
        session = await self.session(rid)
        assert isinstance(session, PrefillSession)
        self.manager.call(partial(session.begin, hit))
        use = DeviceUse()
        total = (len(engine_blocks) + 1) // 2
        blocks = [
            PushBlock(index, tuple(engine_blocks[index * 2 : index * 2 + 2]))
            for index in range(first, total)
        ]
        for layer in range(LAYOUT.num_layers):
            use.enter()
            self.manager.call(partial(session.push_layer, layer, blocks, use))
        self.manager.call(partial(session.vllm_finished, True))
        assert await asyncio.to_thread(use.wait_idle, WAIT_S)


class ScriptedFront:
    """The front's side of the control connection, driven step by step by a test."""

    def __init__(self) -> None:
        self.channels: dict[str, Channel[ToFront]] = {}
        self.hellos: dict[str, Hello] = {}
        self.reports: dict[str, Report] = {}
        self.published: set[bytes] = set()
        self.dropped: set[bytes] = set()
        self._inbox: dict[tuple[str, type], asyncio.Queue[Message]] = {}
        self._joined: dict[str, asyncio.Event] = {}
        self._reported: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.refuse = ""
        self.quiet = True  # nobody writes for sessions that a newcomer had before

    async def __aenter__(self) -> ScriptedFront:
        self._server = await asyncio.start_server(self._engine, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for channel in self.channels.values():
            await channel.close()

    async def _engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel: Channel[ToFront] = Channel(reader, writer, ToFront)  # type: ignore[arg-type]
        hello = await channel.receive()
        assert isinstance(hello, Hello)
        if self.refuse:
            channel.send(Refused(reason=self.refuse))
            await channel.close()
            return
        name = hello.peer.engine
        channel.send(Welcome(front="test", report_interval_s=0.02, weight_epoch=0))
        for other, existing in self.channels.items():
            if other != name:
                existing.send(PeerUp(peer=hello.peer))
                channel.send(PeerUp(peer=self.hellos[other].peer, quiet=self.quiet))
        self.channels[name], self.hellos[name] = channel, hello
        self._joined.setdefault(name, asyncio.Event()).set()
        with contextlib.suppress(EOFError):
            while True:
                message = await channel.receive()
                if isinstance(message, Report):
                    self.reports[name] = message
                    self._reported[name].set()
                elif isinstance(message, Published):
                    self.published |= {ref.key for ref in message.blocks}
                elif isinstance(message, Dropped):
                    self.dropped |= set(message.keys)
                else:
                    self.inbox(name, type(message)).put_nowait(message)
        self._ended[name].set()

    async def ended(self, engine: str) -> None:
        """Wait until its connection has ended."""
        await self._ended[engine].wait()

    def inbox(self, engine: str, kind: type) -> asyncio.Queue[Message]:
        return self._inbox.setdefault((engine, kind), asyncio.Queue())

    async def expect(self, engine: str, kind: type) -> Message:
        async with asyncio.timeout(WAIT_S):
            return await self.inbox(engine, kind).get()

    async def joined(self, engine: str) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._joined.setdefault(engine, asyncio.Event()).wait()

    def send(self, engine: str, message: Message) -> None:
        self.channels[engine].send(message)

    async def idle(self, engine: str) -> Report:
        """The next report in which nothing is held."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self._reported[engine].clear()
                await self._reported[engine].wait()
                stats = self.reports[engine].stats
                if not (stats.buffer_slots_used or stats.sessions or stats.transfers):
                    assert stats.read_queue_tokens == 0
                    return self.reports[engine]

    async def reported(self, engine: str) -> EngineStats:
        """Of the next report that was begun after this call."""
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):
                self._reported[engine].clear()
                await self._reported[engine].wait()
            return self.reports[engine].stats

    async def reported_buffer(self, engine: str) -> int:
        """Slots in use."""
        return (await self.reported(engine)).buffer_slots_used

    async def reported_sessions(self, engine: str) -> int:
        """Open or waiting for the word that their PE is over."""
        return (await self.reported(engine)).sessions

    async def open(
        self,
        rid: str,
        keys: list[bytes],
        tokens: int,
        hit: int,
        pe_reads: int,
        deadline_s: float = 60.0,
    ) -> tuple[int, int]:
        """Open both sides; the PE reads ``pe_reads`` blocks, the DE the others of the hit."""
        spec = SessionSpec(
            rid=rid, attempt=0, root=ROOT, keys=keys, prompt_tokens=tokens, hit_blocks=hit,
            deadline_s=deadline_s,
        )  # fmt: skip
        self.send("de0", OpenDecode(spec=spec, read=(pe_reads, hit), prefill_engine="pe0"))
        allocated = await self.expect("de0", Allocated)
        assert isinstance(allocated, Allocated)
        self.send(
            "pe0",
            OpenPrefill(
                spec=spec, read=(0, pe_reads), decode_engine="de0",
                decode_incarnation=self.hellos["de0"].peer.incarnation, slots=allocated.slots,
            ),
        )  # fmt: skip
        of_pe, of_de = await self.expect("pe0", Opened), await self.expect("de0", Opened)
        assert isinstance(of_pe, Opened)
        assert isinstance(of_de, Opened)
        assert not of_pe.error + of_de.error
        return of_pe.good_blocks, of_de.good_blocks

    async def close(self, rid: str) -> None:
        for engine in ("pe0", "de0"):
            self.send(engine, Close(rid=rid, attempt=0, reason="test"))
            await self.expect(engine, Closed)


class Pair:
    """A PE, a DE and the front."""

    def __init__(self, front: ScriptedFront, pe: Engine, de: Engine) -> None:
        self.front, self.pe, self.de = front, pe, de

    async def turn(
        self,
        rid: str,
        tokens: list[int],
        hit: int,
        pe_reads: int,
        answer: list[int],
        *,
        load_first: bool = False,
    ) -> tuple[list[bytes], list[bytes]]:
        """One request; returns the prompt's bytes in the PE's cache and in the DE's.

        Args:
            load_first: vLLM's request is at the DE before the front's word to use the buffer.
        """
        keys = chain_keys(ROOT, tokens, 64)
        engine_blocks = list(range(2 * LAYOUT.blocks_for_tokens(len(tokens))))
        pe_blocks = [block + 3 for block in engine_blocks]
        de_blocks = [CACHE_BLOCKS - 1 - block for block in engine_blocks]
        good_pe, good_de = await self.front.open(rid, keys, len(tokens), hit, pe_reads)
        assert (good_pe, good_de) == (pe_reads, hit - pe_reads)
        if hit:
            await self.pe.load(rid, pe_blocks[: 2 * hit])
        self.pe.fill(pe_blocks[2 * hit :])
        await self.pe.push(rid, pe_blocks, hit, hit)
        done = await self.front.expect("pe0", PrefillDone)
        assert isinstance(done, PrefillDone)
        assert not done.error
        if load_first:
            loading = asyncio.create_task(self.de.load(rid, de_blocks))
            await asyncio.sleep(0.05)
            assert not loading.done()
        self.front.send("de0", GoDecode(rid=rid, attempt=0, good_blocks=hit))
        if not load_first:
            await asyncio.sleep(0.05)
            loading = asyncio.create_task(self.de.load(rid, de_blocks))
        await loading
        session = await self.de.session(rid)
        assert isinstance(session, DecodeSession)
        whole = tokens + answer
        use = DeviceUse()
        first, last = len(tokens) // 64, len(whole) // 64
        if last > first:
            extra = [20 + block for block in range(2 * (last - first))]
            self.de.fill(extra)
            blocks = [
                PersistBlock(
                    index,
                    tuple(extra[2 * (index - first) : 2 * (index - first) + 2]),
                    tuple(whole[index * 64 : index * 64 + 64]),
                )
                for index in range(first, last)
            ]
            use.enter(len(blocks))
            self.de.manager.call(partial(session.persist, rid, blocks, use))
        self.de.manager.call(session.vllm_finished)
        durable = await self.front.expect("de0", TurnDurable)
        assert isinstance(durable, TurnDurable)
        assert durable.skipped == 0
        assert use.idle
        content = self.pe.content(pe_blocks), self.de.content(de_blocks)
        await self.front.close(rid)
        assert set(chain_keys(ROOT, whole, 64)) <= self.front.published
        return content


def cluster(tmp_path: Path, **buffers: str) -> ClusterConfig:
    return parse(
        {
            "model": {"path": "m"},
            "nodes": [{"name": "n0", "role": "prefill"}, {"name": "n1", "role": "decode"}],
            "buffers": {"prefill": "64KiB", "decode": "128KiB", "landing": "8KiB",
                        "persist": "16KiB", **buffers},
            "storage": {"path": str(tmp_path / "store"), "batch_blocks": 2, "fsync": False},
            "timeouts": {"transfer": "2s", "layer": "5s", "admission": "2s"},
        }
    )  # fmt: skip


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with running(cluster(tmp_path), tmp_path) as started:
        yield started


@contextlib.asynccontextmanager
async def running(config: ClusterConfig, tmp_path: Path) -> AsyncIterator[Pair]:
    async with ScriptedFront() as front:
        pe = Engine(config, Role.PREFILL, front.address, tmp_path)
        de = Engine(config, Role.DECODE, front.address, tmp_path)
        for engine in (pe, de):
            await asyncio.to_thread(engine.manager.start)
        for name in ("pe0", "de0"):
            await front.joined(name)
        yield Pair(front, pe, de)
        try:
            for engine in (pe, de):
                assert engine.manager.failing is None
            for name in ("pe0", "de0"):
                await front.idle(name)
        finally:
            for engine in (pe, de):
                await asyncio.to_thread(engine.manager.stop, WAIT_S)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["de-path", "split", "pe-path"])
async def test_bytes_survive_the_round_trip(pair: Pair, share: float) -> None:
    tokens = list(range(64 * 6 + 17))
    pe_first, de_first = await pair.turn("first", tokens, 0, 0, answer=list(range(60)))
    # Every layer and block of the prompt arrived in the DE's cache as the PE computed it.
    assert by_block(pe_first) == by_block(de_first)
    hit = 6
    again = tokens + list(range(60)) + [9] * 70
    pe_second, de_second = await pair.turn("second", again, hit, int(hit * share), answer=[1] * 90)
    assert by_block(pe_second)[: hit * 2] == by_block(pe_first)[: hit * 2]
    assert by_block(pe_second) == by_block(de_second)
    counters = (await pair.front.idle("pe0")).stats.counters
    counters_de = (await pair.front.idle("de0")).stats.counters
    full = LAYOUT.full_block_bytes
    assert counters.get("pe_path_read_bytes", 0) == int(hit * share) * full
    assert counters_de.get("de_path_read_bytes", 0) == (hit - int(hit * share)) * full
    # On the DE path only miss blocks travel back.
    assert counters.get("push_hit_bytes", 0) == int(hit * share) * full
    assert counters.get("d2_bytes", 0) == (hit - int(hit * share)) * full


async def test_a_load_waits_for_the_word_to_use_the_buffer(pair: Pair) -> None:
    """The two come over different connections. Given up, the prompt would be computed again,
    and a seeded request would draw other tokens than one engine does."""
    tokens = list(range(130))
    pe, de = await pair.turn("r", tokens, 0, 0, [1, 2, 3], load_first=True)
    assert pe == de


def by_block(content: list[bytes]) -> list[tuple[bytes, ...]]:
    per_layer = len(content) // LAYOUT.num_layers
    return [tuple(content[block::per_layer]) for block in range(per_layer)]


async def test_corrupt_block_shortens_the_hit(pair: Pair, tmp_path: Path) -> None:
    tokens = list(range(64 * 4 + 1))
    await pair.turn("first", tokens, 0, 0, answer=[])
    keys = chain_keys(ROOT, tokens, 64)
    (file,) = (tmp_path / "store").rglob(f"{keys[2].hex()}.*")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    for rid, pe_reads, good in (("pe", 4, (2, 0)), ("de", 0, (0, 2))):
        assert await pair.front.open(rid, keys, len(tokens), 4, pe_reads) == good
        await pair.front.close(rid)
        assert not file.exists()
        assert keys[2] in pair.front.dropped
        pair.front.dropped.clear()


async def test_a_full_store_evicts_and_the_front_is_told(tmp_path: Path) -> None:
    config = cluster(tmp_path)
    room = 8 * (4096 + LAYOUT.slot_bytes)
    storage = msgspec.structs.replace(config.storage, capacity=Size(room))
    async with running(msgspec.structs.replace(config, storage=storage), tmp_path) as pair:
        tokens, other = list(range(64 * 4 + 1)), list(range(500, 500 + 64 * 6 + 1))
        await pair.turn("first", tokens, 0, 0, answer=[])
        keys = chain_keys(ROOT, tokens, 64)
        await pair.turn("second", other, 0, 0, answer=[])
        assert pair.front.dropped == set(keys[2:])
        assert sum(1 for _ in (tmp_path / "store" / "blocks").rglob("*.*")) == 8
        # What a prompt under way stands on stays, by whichever side it is read.
        assert await pair.front.open("under way", keys, len(tokens), 2, 1) == (1, 1)
        await pair.turn("third", list(range(900, 900 + 64 * 6 + 1)), 0, 0, answer=[])
        assert pair.front.dropped == {*keys[2:], *chain_keys(ROOT, other, 64)}
        await pair.front.close("under way")
        more = list(range(2000, 2000 + 64 * 8))
        await pair.turn("fourth", more, 0, 0, answer=[])
        assert set(keys) <= pair.front.dropped
        counters = (await pair.front.idle("de0")).stats.counters
        assert counters["storage_evicted_blocks"] == 4 + 6 + 6
    assert not list((tmp_path / "store" / "tmp").iterdir())


async def test_close_at_every_stage_leaves_nothing(pair: Pair) -> None:
    tokens = list(range(64 * 6))
    keys = chain_keys(ROOT, tokens, 64)
    await pair.turn("first", tokens, 0, 0, answer=[])
    for stage in range(4):
        rid = f"close{stage}"
        await pair.front.open(rid, keys, len(tokens), 5, 3)
        if stage >= 1:
            await pair.pe.load(rid, list(range(10)))
        if stage >= 2:
            await pair.pe.push(rid, list(range(12)), 5, 5)
        if stage >= 3:
            await pair.front.expect("pe0", PrefillDone)
            pair.front.send("de0", GoDecode(rid=rid, attempt=0, good_blocks=5))
        await pair.front.close(rid)
        await pair.front.idle("pe0")
        await pair.front.idle("de0")


async def test_a_session_past_its_deadline_waits_for_the_word_that_its_pe_is_over(
    pair: Pair,
) -> None:
    """A DE that was stopped reads the front's ``Close`` only after its own deadline."""
    tokens = list(range(3 * 64))
    keys = chain_keys(ROOT, tokens, 64)
    await pair.front.open("late", keys, len(tokens), 0, 0, deadline_s=0.3)
    for engine in ("pe0", "de0"):
        await pair.front.expect(engine, Closed)
    await pair.front.idle("pe0")
    assert await pair.front.reported_sessions("de0") == 1, "the PE might still write"
    await pair.front.close("late")
    await pair.front.idle("de0")


@pytest.mark.parametrize("quiet", [True, False])
async def test_a_de_that_connects_again_keeps_what_its_pe_may_write_to(
    pair: Pair, quiet: bool
) -> None:
    front = pair.front
    tokens = list(range(3 * 64))
    await front.open("cut", chain_keys(ROOT, tokens, 64), len(tokens), 0, 0)
    front.quiet = quiet
    front._joined["de0"].clear()
    await front.channels["de0"].close()
    await front.joined("de0")
    if quiet:
        await front.idle("de0")
        front.send("pe0", Close(rid="cut", attempt=0, reason="test"))
    else:
        assert await front.reported_sessions("de0") == 1, "the PE may still write"
        await front.close("cut")
    await front.idle("pe0")
    await front.idle("de0")


async def test_buffer_full_waits_then_serves(pair: Pair) -> None:
    """Two prompts that do not fit together: the second opens when the first is closed."""
    tokens = list(range(64 * 10))
    keys = chain_keys(ROOT, tokens, 64)
    await pair.front.open("one", keys, len(tokens), 0, 0)
    waiting = asyncio.create_task(pair.front.open("two", keys, len(tokens), 0, 0))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await pair.front.close("one")
    assert await waiting == (0, 0)
    await pair.front.close("two")


async def test_prompt_larger_than_the_buffer_is_refused_for_good(pair: Pair) -> None:
    tokens = list(range(64 * 40))
    spec = SessionSpec(
        rid="huge", attempt=0, root=ROOT, keys=chain_keys(ROOT, tokens, 64),
        prompt_tokens=len(tokens), hit_blocks=0,
    )  # fmt: skip
    pair.front.send("de0", OpenDecode(spec=spec, read=(0, 0)))
    opened = await pair.front.expect("de0", Opened)
    assert isinstance(opened, Opened)
    assert opened.permanent
    assert "buffers.decode" in opened.error
    pair.front.send("de0", Close(rid="huge", attempt=0, reason="test"))
    await pair.front.expect("de0", Closed)


async def test_refused_engine_says_why(tmp_path: Path) -> None:
    async with ScriptedFront() as front:
        front.refuse = "dtype: 'float32' != 'bfloat16'"
        engine = Engine(cluster(tmp_path), Role.PREFILL, front.address, tmp_path)
        with pytest.raises(HandshakeRefused, match="dtype"):
            await asyncio.to_thread(engine.manager.start)
        await asyncio.to_thread(engine.manager.stop, WAIT_S)
