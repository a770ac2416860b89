"""Tokens equal a plain vLLM's, whichever way the KV came."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from cluster_kit import Api, Servers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 64
_seeds = itertools.count(1)


def random_prompt(tokens: int) -> list[int]:
    source = random.Random(f"prompt {next(_seeds)}")
    return [source.randrange(100, 40_000) for _ in range(tokens)]


async def policy(front: Api, name: str) -> None:
    await front.idle()
    await front.post("/admin/mode", {"mode": "dualpath", "policy": name})


def hit_tokens(prompt: list[int], before: list[int]) -> int:
    """Whole blocks that a turn before has made durable; one token is always computed."""
    stored = (len(before) // BLOCK) * BLOCK
    return min(stored, (len(prompt) - 1) // BLOCK * BLOCK)


@pytest.mark.parametrize("way", ["pe_only", "de_only", "split", "paper"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 700])
async def test_turns_of_an_agent(front: Api, plain: Api, way: str, length: int) -> None:
    await policy(front, way)
    prompt, before = random_prompt(length), []
    paths = (await front.state())["path"]
    hits = 0
    for turn in range(3):
        answer = await front.complete(prompt, 40)
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == await plain.tokens(prompt, 40), f"turn {turn}"
        expected = hit_tokens(prompt, before)
        details = answer["usage"]["prompt_tokens_details"] or {}
        assert details.get("cached_tokens", 0) == expected
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == 40
        hits += expected
        # KV exists for every token but the last, which was never fed back.
        before = (prompt + tokens)[:-1]
        prompt = prompt + tokens + random_prompt(50)
    moved = {side: count - paths[side] for side, count in (await front.state())["path"].items()}
    full_block = 4 * BLOCK * 2 * 2 * 64 * 4  # layers, tokens, K and V, KV heads, head size, float32
    assert moved["pe"] + moved["de"] == hits // BLOCK * full_block
    if way == "pe_only":
        assert moved["de"] == 0
    if way == "de_only":
        assert moved["pe"] == 0
    if way == "split" and hits > 4 * BLOCK:
        assert moved["pe"] > 0
        assert moved["de"] > 0


async def test_eight_agents_at_once(front: Api, plain: Api) -> None:
    await policy(front, "alternating")
    shared = random_prompt(3 * BLOCK)

    async def agent(number: int) -> None:
        prompt = shared + random_prompt(20 + 60 * number)
        for _ in range(3):
            tokens = await front.tokens(prompt, 24)
            assert tokens == await plain.tokens(prompt, 24), f"agent {number}"
            prompt = prompt + tokens + random_prompt(70)

    await asyncio.gather(*(agent(number) for number in range(8)))


async def test_prompt_longer_than_a_step_with_hits(front: Api, plain: Api) -> None:
    """256 tokens a step: hits come first, then several chunks of misses."""
    for way in ("pe_only", "de_only", "split"):
        await policy(front, way)
        prompt = random_prompt(5 * BLOCK + 3)
        await front.tokens(prompt, 2)
        longer = prompt + random_prompt(600)
        assert await front.tokens(longer, 8) == await plain.tokens(longer, 8)


async def test_log_probabilities(front: Api, plain: Api) -> None:
    """Far tighter than tokens: the same numbers, not only the same argmax."""
    await policy(front, "split")
    prompt = random_prompt(6 * BLOCK + 9)
    await front.tokens(prompt, 4)
    more = prompt + random_prompt(30)
    ours = (await front.complete(more, 16, logprobs=3))["choices"][0]
    theirs = (await plain.complete(more, 16, logprobs=3))["choices"][0]
    assert ours["token_ids"] == theirs["token_ids"]
    for a, b in zip(
        ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
    ):
        assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("way", ["pe_only", "de_only", "split"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
async def test_damaged_block_is_computed_again(
    front: Api, plain: Api, servers: Servers, way: str, harm: str
) -> None:
    await policy(front, way)
    known = set(servers.store.rglob("*.*"))
    prompt = random_prompt(6 * BLOCK + 5)
    await front.tokens(prompt, 4)
    written = sorted(
        (file for file in set(servers.store.rglob("*.*")) - known if file.is_file()),
        key=lambda file: file.stat().st_mtime_ns,
    )
    assert len(written) == 6
    victim = written[3]
    damage(victim, harm)
    answer = await front.complete(prompt, 4)
    assert answer["choices"][0]["token_ids"] == await plain.tokens(prompt, 4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 6 * BLOCK
    # The damaged block is gone, and a good one has taken its place.
    again = await front.complete(prompt, 4)
    assert again["choices"][0]["token_ids"] == await plain.tokens(prompt, 4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK


def damage(file: Path, harm: str) -> None:
    if harm == "remove":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[5000] ^= 0x10
    else:
        del data[-4096:]
    file.write_bytes(data)
