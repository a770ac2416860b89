"""Layers that take turns, in other shapes: latent attention with blocks of 16, and a real model of
30 layers in three regions with stored blocks of 128 tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator

import aiohttp
import mla_model
import pytest
from cluster_kit import Api, Servers, open_session
from layer_kit import assert_same, counters, pe_stats, policy, same_numbers, slow_cluster

from dualpath.engine import models

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

_seeds = itertools.count(1)


def random_prompt(tokens: int) -> list[int]:
    source = random.Random(f"layerwise models {next(_seeds)}")
    return [source.randrange(100, 40_000) for _ in range(tokens)]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session(300) as session:
        yield session


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("latent")
    model = mla_model.make(folder / "model", models.ensure(models.BundledModel.TINY))
    # vLLM's CPU backend computes latent attention unchunked and in blocks of 16 tokens. Its own
    # rotary kernel takes the strided keys of this model for contiguous ones, so that a token's KV
    # depends on how many tokens a step has: the plain PyTorch one does not.
    engine = {
        "kv_cache": "32MiB", "engine_block_tokens": 16, "max_batched_tokens": 2048,
        "max_num_seqs": 8,
        "extra_args": ["--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'],
    }  # fmt: skip
    with slow_cluster(folder, model, engine) as started:
        yield started


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    engine = {
        "kv_cache": "160MiB", "block_tokens": 128, "engine_block_tokens": 32,
        "prefetch_layers": 2, "max_batched_tokens": 160, "max_num_seqs": 4,
    }  # fmt: skip
    with slow_cluster(
        tmp_path_factory.mktemp("smollm2"),
        models.ensure(models.BundledModel.SMOLLM2),
        engine,
        buffers={"prefill": "256MiB", "decode": "256MiB", "landing": "16MiB", "persist": "16MiB"},
    ) as started:
        yield started


async def test_latent_attention(latent: Servers, http: aiohttp.ClientSession) -> None:
    front, plain = Api(latent.cluster.url, http), Api(latent.plain.url, http)
    for way in ("pe_only", "de_only", "split"):
        await policy(front, way)
        prompt = random_prompt(200)
        assert await same_numbers(front, plain, prompt, 3, 5e-3) == 0
        assert await same_numbers(front, plain, prompt + random_prompt(77), 3, 5e-3) == 192
    known = random_prompt(330)
    await front.tokens(known, 1)
    prompts = [known[: 64 * number] + random_prompt(40 + number) for number in range(6)]
    ours = await asyncio.gather(*(front.complete(prompt, 2, logprobs=1) for prompt in prompts))
    for prompt, answer in zip(prompts, ours, strict=True):
        # In a batch of another shape a plain vLLM differs from itself by as much.
        assert_same(answer, await plain.complete(prompt, 2, logprobs=1), 2e-2)
    assert (await counters(front))["poisoned_layers"] > 0
    await front.idle()


async def test_real_model_in_three_regions(smollm2: Servers, http: aiohttp.ClientSession) -> None:
    front, plain = Api(smollm2.cluster.url, http), Api(smollm2.plain.url, http)
    tokens_of_one = (160 << 20) // (30 * 2 * 3 * 64 * 4)  # all layers, K and V, 3 heads of 64
    held = (await pe_stats(front))["hbm_tokens_total"]
    assert held == pytest.approx(10 * tokens_of_one, rel=0.01)
    for way in ("de_only", "split"):
        await policy(front, way)
        prompt = random_prompt(300)
        assert await same_numbers(front, plain, prompt, 2) == 0
        assert await same_numbers(front, plain, prompt + random_prompt(200), 4) == 256
    found = await counters(front)
    assert found["poisoned_layers"] > 0
    assert found["moved_twice_bytes"] > 0
    await front.idle()
