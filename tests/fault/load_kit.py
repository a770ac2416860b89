"""Eight agents at work while something is broken, and what must hold whatever it was."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import aiohttp
import pytest
from cluster_kit import Api

BLOCK = 64
TIE = 1e-4
"""Log-probabilities of hits and of a plain server agree to this (``e2e/test_tokens.py``)."""


async def all_usable(api: Api, engines: int, within_s: float = 300.0) -> None:
    """Wait until that many engines get work."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                found = (await api.state())["engines"]
            except (aiohttp.ClientError, AssertionError):
                found = []
            if sum(engine["usable"] for engine in found) == engines:
                return
            await asyncio.sleep(0.2)


class Load:
    """Eight agents over shared history; each answer is checked against the plain server's."""

    def __init__(self, api: Api, plain: Api, seed: str, deadline_s: float) -> None:
        self.api, self.plain = api, plain
        self.deadline_s = deadline_s
        self.source = random.Random(seed)
        self.served = self.refused = self.hit_tokens = 0

    def words(self, count: int) -> list[int]:
        return [self.source.randrange(100, 40_000) for _ in range(count)]

    async def warm(self, blocks: int = 14) -> list[list[int]]:
        prompts = [self.words(blocks * BLOCK) for _ in range(8)]
        await asyncio.gather(*(self.api.tokens(prompt, 2) for prompt in prompts))
        return prompts

    async def agent(self, prompt: list[int], turns: int) -> None:
        for _ in range(turns):
            prompt = await self.turn(prompt + self.words(40))

    async def turn(self, prompt: list[int], tokens: int = 12, **more: Any) -> list[int]:
        """One request; the prompt with its answer (or without, when it was refused)."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        async with asyncio.timeout(self.deadline_s + 10):  # its deadline, and the way back
            url = self.api.url + "/v1/completions"
            async with self.api.session.post(url, json=body) as response:
                answer = await response.json()
        if response.status != 200:
            assert response.status in (500, 502, 503, 504), answer
            assert answer["error"]["message"]
            self.refused += 1
            return prompt
        self.served += 1
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached % BLOCK == 0
        self.hit_tokens += cached
        expected = await self.plain.tokens(prompt, tokens)
        for choice in answer["choices"]:
            await self.check(prompt, expected, choice["token_ids"], response)
        return prompt + list(answer["choices"][-1]["token_ids"])

    async def check(
        self,
        prompt: list[int],
        expected: list[int],
        got: list[int],
        response: aiohttp.ClientResponse,
    ) -> None:
        """Fail unless ``got`` is the plain server's answer, or parts from it only where that server
        is undecided: which of two tokens within ``TIE`` wins depends on how a prompt was cut into
        steps, there as here. After such a token everything else must be its answer again."""
        at = 0
        while got[at:] != expected:
            at += next(i for i, (a, b) in enumerate(zip(expected, got[at:], strict=True)) if a != b)
            near = await self.plain.complete(
                prompt + got[:at], 1, logprobs=5, return_tokens_as_token_ids=True
            )
            top = near["choices"][0]["logprobs"]["top_logprobs"][0]
            other = top.get(f"token_id:{got[at]}")
            if other is None or max(top.values()) - other >= TIE:
                again = await self.api.tokens(prompt, len(got))
                names = ("x-request-id", "x-dualpath-path")
                pytest.fail(
                    f"wrong token {at} of {len(got)}: {got[at]}; prompt of {len(prompt)} tokens, "
                    f"{[response.headers.get(name) for name in names]}; the plain server's choice "
                    f"there: {top}; asked again it is {'the same' if again == got else 'another'}"
                )
            at += 1
            if at == len(got):
                return
            expected = await self.plain.tokens(prompt + got[:at], len(got) - at)


async def under_load(
    api: Api, plain: Api, seed: str, turns: int, harm: Any, deadline_s: float
) -> Load:
    """Run ``harm`` while eight agents take their turns."""
    load = Load(api, plain, seed, deadline_s)
    prompts = await load.warm()
    agents = asyncio.gather(*(load.agent(prompt, turns) for prompt in prompts))
    await asyncio.sleep(1.5)
    await harm()
    await agents
    assert load.served + load.refused == 8 * turns
    return load


def counters(state: Any) -> dict[str, dict[str, float]]:
    """Each engine's totals, by its name."""
    return {engine["name"]: engine["stats"].get("counters", {}) for engine in state["engines"]}


def grown(before: Any, after: Any, name: str) -> dict[str, float]:
    """By how much a total of each engine has grown between two states."""
    old, new = counters(before), counters(after)
    return {
        engine: new[engine].get(name, 0.0) - old.get(engine, {}).get(name, 0.0) for engine in new
    }


async def sample(api: Api, name: str) -> float:
    """Sum of a metric's samples, as Prometheus would scrape it."""
    async with api.session.get(api.url + "/metrics") as response:
        text = await response.text()
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return sum(map(float, found))
