"""Layers that take turns in a PE's memory give the tokens and numbers of a plain vLLM, however
late each layer's KV arrives or leaves, with little memory, and with prompts begun again."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from cluster_kit import Api, Servers, open_session
from layer_kit import assert_same, counters, pe_stats, policy, same_numbers, slow_cluster

from dualpath.engine import models

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 64
LAYERS, REGIONS = 4, 2
KV_BLOCKS = 120
PE_SHARE = 4  # of SlowSmallWorker
FULL_BLOCK_BYTES = LAYERS * BLOCK * 2 * 2 * 64 * 4  # K and V, KV heads, head size, float32
_seeds = itertools.count(1)


def random_prompt(tokens: int) -> list[int]:
    source = random.Random(f"layerwise {next(_seeds)}")
    return [source.randrange(100, 40_000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Little memory, and chunks of 40 tokens at most, so that several prompts grow at once and
    none of them in whole blocks."""
    engine = {
        "kv_cache": f"{KV_BLOCKS * FULL_BLOCK_BYTES}B",
        "max_batched_tokens": 256,
        "max_num_seqs": 8,
    }
    with slow_cluster(
        tmp_path_factory.mktemp("layerwise"),
        models.ensure(models.BundledModel.TINY),
        engine,
        args=("--long-prefill-token-threshold", "40"),
        worker="SlowSmallWorker",
    ) as started:
        yield started


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session(200) as session:
        yield session


@pytest.fixture
async def front(servers: Servers, http: aiohttp.ClientSession) -> AsyncIterator[Api]:
    api = Api(servers.cluster.url, http)
    yield api
    await api.idle()


@pytest.fixture
def plain(servers: Servers, http: aiohttp.ClientSession) -> Api:
    return Api(servers.plain.url, http)


async def test_as_many_more_blocks_fit(front: Api, servers: Servers) -> None:
    stats = await pe_stats(front)
    assert stats["hbm_tokens_total"] == KV_BLOCKS // PE_SHARE * BLOCK * LAYERS // REGIONS
    log = next(servers.store.parent.glob("run/pe0.log"), None)
    assert log is not None
    assert f"{LAYERS} layers take turns in {REGIONS} regions" in log.read_text(errors="replace")


@pytest.mark.parametrize("way", ["pe_only", "de_only", "split"])
async def test_chunks_and_hits(front: Api, plain: Api, way: str) -> None:
    """A cold prompt in many steps, then longer and longer ones that hit."""
    await policy(front, way)
    before = await counters(front)
    prompt = random_prompt(500)
    assert await same_numbers(front, plain, prompt, 5) == 0
    longer = prompt + random_prompt(333)
    assert await same_numbers(front, plain, longer, 5) == 500 // BLOCK * BLOCK
    longest = longer + random_prompt(60)
    assert await same_numbers(front, plain, longest, 5) == (500 + 333) // BLOCK * BLOCK
    after = await counters(front)
    assert after["poisoned_layers"] > before.get("poisoned_layers", 0)
    assert after["moved_twice_bytes"] > before.get("moved_twice_bytes", 0)


@pytest.mark.parametrize("length", [1, 40, 63, 64, 65, 81, 128])
async def test_edges(front: Api, plain: Api, length: int) -> None:
    await policy(front, "alternating")
    prompt = random_prompt(length)
    assert await same_numbers(front, plain, prompt, 2) == 0
    assert await same_numbers(front, plain, prompt + prompt[:1], 2) == length // BLOCK * BLOCK


async def test_a_batch_of_different_hits_and_prompts_begun_again(front: Api, plain: Api) -> None:
    """Ten prompts, seven of them at a time, with hits of different lengths, more than fit: some
    are preempted in the middle and begin again."""
    await policy(front, "split")
    known = [random_prompt(200 + 64 * number) for number in range(7)]
    for prompt in known:
        await front.tokens(prompt, 1)
    before = await counters(front)
    prompts = [prompt + random_prompt(350 + 30 * number) for number, prompt in enumerate(known)]
    prompts += [random_prompt(650 + 30 * number) for number in range(3)]
    ours = await asyncio.gather(*(front.complete(prompt, 3, logprobs=1) for prompt in prompts))
    for prompt, answer in zip(prompts, ours, strict=True):
        assert_same(answer, await plain.complete(prompt, 3, logprobs=1), 1e-3)
    after = await counters(front)
    assert after.get("preemptions", 0) > before.get("preemptions", 0)


async def test_aborted_in_mid_prompt(front: Api, plain: Api) -> None:
    """Clients leave while their prompts are half computed; the others notice nothing, and every
    ledger is empty afterwards."""
    await policy(front, "split")
    known = random_prompt(320)
    await front.tokens(known, 1)
    leaving = [asyncio.create_task(front.complete(known + random_prompt(900), 8)) for _ in range(6)]
    staying = known + random_prompt(400)
    answer = asyncio.create_task(same_numbers(front, plain, staying, 4))
    for number, task in enumerate(leaving):
        await asyncio.sleep(0.15 * number)
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await answer
    await front.idle()
    await same_numbers(front, plain, known + random_prompt(100), 4)


async def test_basic_is_refused_at_run_time(front: Api) -> None:
    await front.idle()
    await front.post("/admin/mode", {"mode": "basic"}, status=400)


async def test_others_get_one_step_from_a_pe(front: Api, plain: Api, servers: Servers) -> None:
    """A request that is not the front's has nowhere to keep its KV: one step is served, a second
    would read what another layer left behind, and is an error."""
    state = await front.state()
    (url,) = [engine["url"] for engine in state["engines"] if engine["role"] == "prefill"]
    engine = Api(url, front.session)
    prompt = random_prompt(80)
    assert await engine.tokens(prompt, 1) == await plain.tokens(prompt, 1)
    for wanted in ((prompt, 2), (random_prompt(300), 1)):
        body = {"model": "tiny", "prompt": wanted[0], "max_tokens": wanted[1], "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        async with front.session.post(url + "/v1/completions", json=body) as response:
            text = await response.text()
            assert response.status >= 500, text
