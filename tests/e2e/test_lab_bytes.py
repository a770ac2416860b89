"""Real engines on the lab's hosts: in every mode the kernel counts the bytes that our metrics tell,
on the NICs that they should pass, and tokens are the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from test_tokens import BLOCK, random_prompt

from dualpath.config import ConfigError, Mode
from dualpath.lab.agreement import Agreement, Flow, agreement, snapshot
from dualpath.lab.cluster import Lab, lab_cluster
from dualpath.lab.network import check_machine
from dualpath.lab.removing import leftovers
from dualpath.lab.spec import LabSpec

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(900)]

MODES = (Mode.BASIC, Mode.PE_ONLY, Mode.DUALPATH, Mode.SPLIT)
AGENTS, TURNS, CONTEXT, APPEND, GEN = 4, 3, 1000, 100, 16
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head size, float32


async def agent(lab: Lab, http: aiohttp.ClientSession, prompts: list[list[int]]) -> list[int]:
    """One agent's tokens: each turn's prompt is all before it and what is appended."""
    context: list[int] = []
    answered: list[int] = []
    for prompt in prompts:
        context += prompt
        body = {
            "model": lab.config.model.name, "prompt": context, "max_tokens": GEN,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with http.post(f"{lab.front_url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == GEN
        context += tokens
        answered += tokens
    return answered


async def serve(lab: Lab, agents: list[list[list[int]]]) -> tuple[list[list[int]], Agreement]:
    """The agents at once on an empty store; their tokens, and the bytes that it took."""
    await lab.fresh_store()
    before = await snapshot(lab)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        tokens = await asyncio.gather(*(agent(lab, http, prompts) for prompts in agents))
    await lab.drained()
    return list(tokens), agreement(before, await snapshot(lab))


async def test_bytes_are_where_and_as_many_as_we_say(model: Path, tmp_path: Path) -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    agents = [
        [random_prompt(CONTEXT), *(random_prompt(APPEND) for _ in range(TURNS - 1))]
        for _ in range(AGENTS)
    ]
    hit_blocks = AGENTS * sum(
        (CONTEXT + turn * (APPEND + GEN) + GEN - 1) // BLOCK for turn in range(TURNS - 1)
    )
    first: list[list[int]] = []
    async with lab_cluster(LabSpec(str(model)), tmp_path) as lab:
        for mode in MODES:
            await lab.set_mode(mode)
            tokens, found = await serve(lab, agents)
            assert tokens == (first or tokens), mode
            first = tokens
            assert found.agrees, (mode, found)
            read = {one.where: one.kernel_bytes for one in found.lines if one.flow is Flow.READ}
            # Everything that was stored is read, once, in every mode.
            assert sum(read.values()) >= hit_blocks * BLOCK * TOKEN_BYTES
            if mode in (Mode.BASIC, Mode.PE_ONLY):
                assert read["de0"] < 0.05 * read["pe0"]
            else:
                assert read["de0"] > 0.2 * read["pe0"] > 0
        assert (await lab.state())["requests_open"] == 0
    assert leftovers() == []
