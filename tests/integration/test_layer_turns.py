"""Chunked prompts through layers that take turns: the worker half, two traffic managers, real NIXL
and a real store; only the model is made up. It knows what every token's KV must be in every layer,
checks all it reads, and its regions hold poison whenever they are free."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_sessions import LAYOUT, ROOT, WAIT_S, Engine, ScriptedFront, cluster

from dualpath.blocks import chain_keys
from dualpath.config import ClusterConfig, Role
from dualpath.control.messages import (
    Close,
    Closed,
    GoDecode,
    Opened,
    OpenPrefill,
    PrefillDone,
    SessionSpec,
    TurnDurable,
)
from dualpath.engine.assemble import EngineIdentity, traffic_manager
from dualpath.engine.layer_turns import LayerTurns
from dualpath.engine.live import LiveFigures
from dualpath.engine.metadata import FinishedRequest, StepMetadata, StepRequest
from dualpath.engine.worker_side import WorkerSide
from dualpath.transfer.copying import Copy, CopyEngine, Fence
from dualpath.transfer.decode import DecodeSession
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.exports import PushBlock
from dualpath.transfer.hbm import DeviceCache
from dualpath.transfer.loads import LoadBlock
from dualpath.transfer.memory import Region
from dualpath.transfer.regions import Regions

pytestmark = pytest.mark.integration

REGIONS = 2
CACHE_BLOCKS = 64
TOKEN = LAYOUT.token_layer_bytes
ENGINE_TOKENS = LAYOUT.engine_block_tokens
STORED_TOKENS = LAYOUT.block_tokens


def kv(tokens: Sequence[int], layer: int, position: int) -> bytes:
    """KV of one token: any function of all that came before it."""
    seed = hash((tuple(tokens[: position + 1]), layer)) & 0xFFFFFFFF
    return seed.to_bytes(4, "little") * (TOKEN // 4)


class LateCopies(CopyEngine):
    """Another copy engine, after a random wait."""

    def __init__(self, engine: CopyEngine, seed: int) -> None:
        self.name = engine.name
        self._engine = engine
        self._random = random.Random(seed)

    def fence(self, stream: int) -> Fence | None:
        return self._engine.fence(stream)

    def submit(self, runs: Descriptors, after: Sequence[Fence] = ()) -> Copy:
        time.sleep(self._random.choice((0, 0, 0.001, 0.01)))
        return self._engine.submit(runs, after)

    def close(self) -> None:
        self._engine.close()


@dataclass
class Prompt:
    """A request in the made-up vLLM."""

    rid: str
    tokens: list[int]
    hit: int
    engine_blocks: list[int]
    computed: int = 0
    begun: bool = False
    loaded: bool = False


@dataclass
class Model:
    """Steps of a made-up vLLM on a PE whose layers take turns."""

    engine: Pe
    worker: WorkerSide
    wrong: list[str] = field(default_factory=list)

    def step(self, shares: Sequence[tuple[Prompt, int]]) -> None:
        """Compute ``count`` more tokens of each prompt. vLLM's thread."""
        meta = StepMetadata(scheduled_tokens=sum(count for _, count in shares))
        meta.requests = [self._plan(prompt, count) for prompt, count in shares]
        self.worker.begin(meta)
        for layer in range(LAYOUT.num_layers):
            for prompt, count in shares:
                self._write(prompt, layer, count)  # vLLM writes before it attends
            for prompt, count in shares:
                self._read(prompt, layer, prompt.computed + count)
            self.worker.after_layer(layer)
        self.worker.end()
        failed = self.worker.take_failed_blocks()
        for prompt, count in shares:
            prompt.computed += count
            if failed.intersection(prompt.engine_blocks):
                prompt.computed = 0

    def finish(self, prompt: Prompt, *, ok: bool = True) -> None:
        """The request is over."""
        meta = StepMetadata()
        meta.finished = [FinishedRequest(prompt.rid, prompt.rid, 0, ok, holds_blocks=True)]
        self.worker.begin(meta)
        self.worker.end()

    def preempt(self, prompt: Prompt, engine_blocks: list[int]) -> None:
        """It loses its blocks, and gets others when it begins again."""
        self.worker.preempted(StepMetadata(preempted=frozenset({prompt.rid})))
        prompt.engine_blocks, prompt.computed, prompt.begun = engine_blocks, 0, False

    def _plan(self, prompt: Prompt, count: int) -> StepRequest:
        first = not prompt.begun or not prompt.computed
        if not prompt.begun:
            prompt.begun, prompt.computed = True, prompt.hit * STORED_TOKENS
        start, end = prompt.computed, prompt.computed + count
        complete = end // STORED_TOKENS
        if end == len(prompt.tokens):
            complete = LAYOUT.blocks_for_tokens(end)
        again, prompt.loaded = prompt.loaded, prompt.loaded or start > 0
        return StepRequest(
            prompt.rid, prompt.rid, 0,
            load=tuple(
                LoadBlock(index, self._blocks(prompt, index))
                for index in range(LAYOUT.blocks_for_tokens(start))
            ),
            load_again=again,
            hit_blocks=start // STORED_TOKENS if first else None,
            push=tuple(
                PushBlock(index, self._blocks(prompt, index), complete=index < complete)
                for index in range(start // STORED_TOKENS, LAYOUT.blocks_for_tokens(end))
            ),
        )  # fmt: skip

    @staticmethod
    def _blocks(prompt: Prompt, index: int) -> tuple[int, ...]:
        per_block = LAYOUT.engine_blocks_per_block
        return tuple(prompt.engine_blocks[index * per_block : (index + 1) * per_block])

    def _address(self, prompt: Prompt, layer: int, position: int) -> int:
        block = prompt.engine_blocks[position // ENGINE_TOKENS]
        return self.engine.cache.address(layer, block) + position % ENGINE_TOKENS * TOKEN

    def _write(self, prompt: Prompt, layer: int, count: int) -> None:
        for position in range(prompt.computed, prompt.computed + count):
            ctypes.memmove(
                self._address(prompt, layer, position), kv(prompt.tokens, layer, position), TOKEN
            )

    def _read(self, prompt: Prompt, layer: int, end: int) -> None:
        if self.worker.failed_requests:
            return  # what is computed from a failed load is thrown away
        for position in range(end):
            found = ctypes.string_at(self._address(prompt, layer, position), TOKEN)
            if found != kv(prompt.tokens, layer, position):
                self.wrong.append(f"{prompt.rid}: layer {layer}, token {position}")
                return


class Pe(Engine):
    """A PE with a pretend cache of two regions."""

    def __init__(self, config: ClusterConfig, front: str, run_dir: Path, seed: int) -> None:
        size = CACHE_BLOCKS * LAYOUT.engine_layer_block_bytes
        self.memory = [Region(size) for _ in range(REGIONS)]
        self.cache = DeviceCache(
            tuple(self.memory[layer % REGIONS].address for layer in range(LAYOUT.num_layers)),
            LAYOUT.engine_layer_block_bytes,
            CACHE_BLOCKS,
            LAYOUT,
        )
        self.regions = Regions(LAYOUT.num_layers, REGIONS)
        self.manager = traffic_manager(
            config,
            EngineIdentity(
                role=Role.PREFILL, rank=0, incarnation=os.urandom(4).hex(), pid=os.getpid(),
                host_id="h", http_url="http://127.0.0.1:1", model="m", layout_id="l", dtype="x",
                max_batched_tokens=2048,
            ),
            self.cache,
            keepalive=self.memory,
            control=front,
            run_dir=run_dir,
            live_stats=dict,
            regions=self.regions,
        )  # fmt: skip
        self._seed = seed
        self._poison()

    def model(self) -> Model:
        turns = LayerTurns(self.manager, self.regions, lambda: None)
        services = self.manager._services
        services.copy_engine = LateCopies(services.copy_engine, self._seed)
        live = LiveFigures(ENGINE_TOKENS, CACHE_BLOCKS)
        worker = WorkerSide(self.manager, LAYOUT.num_layers, services.timeouts, live, turns)
        return Model(self, worker)

    def _poison(self) -> None:
        until_free, done = self.regions.until_free, set[tuple[int, int]]()

        async def and_poison(step: int, layer: int) -> None:
            await until_free(step, layer)
            if (step, layer) not in done:
                done.add((step, layer))
                region = self.memory[layer % REGIONS]
                ctypes.memset(region.address, 0xEE, region.nbytes)

        self.regions.until_free = and_poison  # type: ignore[method-assign]


@dataclass
class Bench:
    """Front, PE and DE."""

    front: ScriptedFront
    pe: Pe
    de: Engine
    model: Model

    async def run(self, prompt: Prompt, pe_reads: int) -> None:
        """Open both sides."""
        keys = chain_keys(ROOT, prompt.tokens, STORED_TOKENS)
        good = await self.front.open(prompt.rid, keys, len(prompt.tokens), prompt.hit, pe_reads)
        assert sum(good) == prompt.hit

    async def step(self, *shares: tuple[Prompt, int]) -> None:
        await asyncio.to_thread(self.model.step, shares)
        assert not self.model.wrong

    async def arrived(self, prompt: Prompt) -> None:
        """The prompt's KV is complete in the DE's buffer, byte for byte; persist it."""
        await asyncio.to_thread(self.model.finish, prompt)
        done = await self.front.expect("pe0", PrefillDone)
        assert isinstance(done, PrefillDone)
        assert not done.error
        self.front.send("de0", GoDecode(rid=prompt.rid, attempt=0, good_blocks=prompt.hit))
        blocks = list(range(LAYOUT.engine_blocks_per_block * 12))
        needed = -(-len(prompt.tokens) // ENGINE_TOKENS)
        await self.de.load(prompt.rid, blocks[:needed])
        for layer in range(LAYOUT.num_layers):
            for position in range(len(prompt.tokens)):
                block, inside = divmod(position, ENGINE_TOKENS)
                view = self.de.memory[layer].view(
                    block * LAYOUT.engine_layer_block_bytes + inside * TOKEN, TOKEN
                )
                assert bytes(view) == kv(prompt.tokens, layer, position), (layer, position)
        session = await self.de.session(prompt.rid)
        assert isinstance(session, DecodeSession)
        self.de.manager.call(session.vllm_finished)
        await self.front.expect("de0", TurnDurable)
        await self.front.close(prompt.rid)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def bench_of(tmp_path: Path, seed: int = 1, **buffers: str) -> AsyncIterator[Bench]:
    config = cluster(tmp_path, **{"prefill": "256KiB", "decode": "256KiB", **buffers})
    async with ScriptedFront() as front:
        pe = Pe(config, front.address, tmp_path, seed)
        de = Engine(config, Role.DECODE, front.address, tmp_path)
        for engine in (pe, de):
            await asyncio.to_thread(engine.manager.start)
        for name in ("pe0", "de0"):
            await front.joined(name)
        made = Bench(front, pe, de, pe.model())
        yield made
        try:
            for engine in (pe, de):
                assert engine.manager.failing is None
            for name in ("pe0", "de0"):
                await front.idle(name)
            pe.regions.check_integrity()
        finally:
            for engine in (pe, de):
                await asyncio.to_thread(engine.manager.stop, WAIT_S)


def prompt_of(rid: str, tokens: int, hit: int = 0, first_block: int = 0, seed: int = 0) -> Prompt:
    count = -(-tokens // ENGINE_TOKENS)
    source = random.Random(seed)
    return Prompt(
        rid, [source.randrange(1000) for _ in range(tokens)], hit,
        [first_block + number for number in range(count)],
    )  # fmt: skip


@pytest.mark.parametrize("pe_reads", [0, 1, 3], ids=["de-path", "split", "pe-path"])
async def test_chunks_that_end_anywhere(bench: Bench, pe_reads: int) -> None:
    cold = prompt_of("cold", 3 * STORED_TOKENS + 20)
    await bench.run(cold, 0)
    for count in (50, 14, 1, 63, 70, 14):
        await bench.step((cold, count))
    await bench.arrived(cold)
    warm = prompt_of("warm", 6 * STORED_TOKENS + 7, 3, first_block=5)
    warm.tokens[: len(cold.tokens)] = cold.tokens
    await bench.run(warm, pe_reads)
    for count in (30, 65, 64, 40):
        await bench.step((warm, count))
    await bench.arrived(warm)
    moved = (await bench.front.idle("pe0")).stats.counters["moved_twice_bytes"]
    # Of cold all chunks but the first bring back what was there, of warm all but the first, which
    # brings the hit for the first time. A stored block is loaded whole.
    starts = [50, 64, 65, 128, 198]
    starts += [warm.hit * STORED_TOKENS + done for done in (30, 95, 159)]
    blocks = sum(LAYOUT.blocks_for_tokens(start) for start in starts)
    full = blocks * LAYOUT.num_layers * LAYOUT.layer_block_bytes
    assert 0 < moved <= full
    assert moved > full - len(starts) * LAYOUT.num_layers * LAYOUT.layer_block_bytes


@pytest.mark.parametrize("seed", range(3))
async def test_batches_preemption_and_aborts_at_random(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    async with bench_of(tmp_path, seed) as bench:
        base = prompt_of("base", 3 * STORED_TOKENS, seed=seed)
        await bench.run(base, 0)
        await bench.step((base, len(base.tokens)))
        await bench.arrived(base)
        prompts = []
        for number in range(4):
            hit = source.choice((0, 1, 2, 3))
            length = max(hit * STORED_TOKENS + 1, source.randrange(1, 4 * STORED_TOKENS))
            prompt = prompt_of(f"r{number}", length, hit, first_block=8 * number, seed=number)
            prompt.tokens[: hit * STORED_TOKENS] = base.tokens[: hit * STORED_TOKENS]
            await bench.run(prompt, source.randrange(hit + 1))
            prompts.append(prompt)
        left = list(prompts)
        spare = 32
        while left:
            batch = source.sample(left, source.randrange(1, len(left) + 1))
            shares = []
            for prompt in batch:
                start = prompt.computed if prompt.begun else prompt.hit * STORED_TOKENS
                shares.append((prompt, source.randrange(1, len(prompt.tokens) - start + 1)))
            await bench.step(*shares)
            for prompt in batch:
                if prompt.computed == len(prompt.tokens):
                    left.remove(prompt)
                    await bench.arrived(prompt)
                elif source.random() < 0.1:
                    left.remove(prompt)
                    await abort(bench, prompt)
                elif source.random() < 0.2 and spare < CACHE_BLOCKS - 8:
                    blocks = [spare + number for number in range(len(prompt.engine_blocks))]
                    spare += 8
                    await asyncio.to_thread(bench.model.preempt, prompt, blocks)


async def abort(bench: Bench, prompt: Prompt) -> None:
    """The client leaves: vLLM ends the request, the front closes both sides."""
    await asyncio.to_thread(bench.model.finish, prompt, ok=False)
    await bench.front.expect("pe0", PrefillDone)
    await bench.front.close(prompt.rid)


async def test_a_load_that_fails_is_computed_again(bench: Bench) -> None:
    """The DE closes under the PE: hits cannot come. With room in the PE buffer the prompt is
    computed from its first token, and layers keep their turns."""
    cold = prompt_of("cold", 3 * STORED_TOKENS)
    await bench.run(cold, 0)
    await bench.step((cold, len(cold.tokens)))
    await bench.arrived(cold)
    warm = prompt_of("warm", 4 * STORED_TOKENS, 3)
    warm.tokens[: len(cold.tokens)] = cold.tokens
    await bench.run(warm, 0)
    session = bench.pe.manager.session("warm", 0)
    real, session._slots = session._slots, [10**6] * len(session._slots)  # type: ignore[union-attr]
    await bench.step((warm, 30))
    assert warm.computed == 0, "vLLM was told to begin again"
    session._slots = real  # type: ignore[union-attr]
    for count in (100, 100, 56):
        await bench.step((warm, count))
    await asyncio.to_thread(bench.model.finish, warm)
    done = await bench.front.expect("pe0", PrefillDone)
    assert isinstance(done, PrefillDone)
    assert not done.error
    await bench.front.close("warm")
    assert (await bench.front.idle("pe0")).stats.counters["loads_failed"] == 1


async def test_closed_in_mid_prompt(bench: Bench) -> None:
    """The front closes while vLLM still steps: its blocks count as missing, nothing is awaited."""
    prompt = prompt_of("gone", 3 * STORED_TOKENS)
    await bench.run(prompt, 0)
    await bench.step((prompt, 70))
    await bench.front.close("gone")
    await bench.step((prompt, 70))
    assert prompt.computed == 0
    await asyncio.to_thread(bench.model.finish, prompt, ok=False)


async def test_computed_blocks_count_in_the_buffers_budget(tmp_path: Path) -> None:
    """Room for four blocks: a prompt of three computes, another of three waits for it to end, one
    of five is refused for good. Nothing more is ever taken than the budget."""
    async with bench_of(tmp_path, prefill=f"{4 * LAYOUT.slot_bytes + 100}B") as bench:
        pool = bench.pe.manager._services.buffer.pool
        assert pool.slots == 4
        first = prompt_of("first", 3 * STORED_TOKENS)
        await bench.run(first, 0)
        assert pool.used == 3
        second = prompt_of("second", 2 * STORED_TOKENS + 1, first_block=20, seed=2)
        opening = asyncio.create_task(bench.run(second, 0))
        await bench.step((first, 100))
        assert not opening.done()
        await bench.step((first, 92))
        await bench.arrived(first)
        await opening
        assert pool.used == 3
        await bench.step((second, len(second.tokens)))
        await bench.arrived(second)
        large = prompt_of("large", 5 * STORED_TOKENS)
        with pytest.raises(AssertionError, match=r"needs 5 slots, buffers\.prefill has 4"):
            await bench.run(large, 0)
        await bench.front.close("large")


async def test_sessions_that_load_all_layers_at_once_are_refused(bench: Bench) -> None:
    spec = SessionSpec(
        rid="b", attempt=0, root=ROOT, keys=[], prompt_tokens=5, hit_blocks=0, layerwise=False,
        deadline_s=60.0,
    )  # fmt: skip
    bench.front.send(
        "pe0",
        OpenPrefill(
            spec=spec, read=(0, 0), decode_engine="de0",
            decode_incarnation=bench.front.hellos["de0"].peer.incarnation, slots=[0],
        ),
    )  # fmt: skip
    opened = await bench.front.expect("pe0", Opened)
    assert isinstance(opened, Opened)
    assert opened.permanent
    assert "engine.layer_aliasing" in opened.error
    bench.front.send("pe0", Close(rid="b", attempt=0, reason="test"))
    await bench.front.expect("pe0", Closed)
