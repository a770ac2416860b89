"""Processes of a real cluster die, stop and come back while agents are served.

After each: no wrong token, every request answered within its deadline, every ledger zero.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from cluster_kit import (
    Api,
    Running,
    cluster_description,
    free_port,
    open_session,
    start,
    until_ready,
)
from cluster_parts import Parts
from load_kit import BLOCK, Load, all_usable, grown
from load_kit import under_load as loaded

from dualpath.engine import models
from dualpath.engine.launch import installed_device, plain_command

pytestmark = [pytest.mark.fault, pytest.mark.e2e, pytest.mark.timeout(900)]

DEADLINE_S = 150.0
ENGINES = 3


@dataclass
class Bench:
    parts: Parts
    plain: Running


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    model = str(models.ensure(models.BundledModel.TINY))
    config = cluster_description(
        model,
        folder / "store",
        free_port(),
        # Slow storage NICs: a kill finds reads, pulls and pushes under way.
        nodes=[
            {"name": "p0", "role": "prefill", "base_port": free_port(), "snic": {"read": "6MB/s"}},
            {"name": "p1", "role": "prefill", "base_port": free_port(), "snic": {"read": "6MB/s"}},
            {"name": "d", "role": "decode", "base_port": free_port(), "snic": {"read": "6MB/s"}},
        ],
        front={"port": 0, "control_port": 0, "max_retries": 4},
        timeouts={"transfer": "3s", "layer": "6s", "request": "150s", "admission": "140s"},
    )
    config = with_ports(config)
    parts = Parts(config, folder)
    port = free_port()
    command = plain_command(
        config, python=sys.executable, device=installed_device(), host="127.0.0.1", http_port=port
    )
    plain = start(
        list(command.argv), folder / "plain.log", f"http://127.0.0.1:{port}", dict(command.env)
    )
    try:
        for name in ("front", "pe0", "pe1", "de0"):
            parts.start(name)
        until_ready(plain, "/health")
        parts.until_ready()
        yield Bench(parts, plain)
    finally:
        parts.stop_all()
        plain.stop()


def with_ports(config: Any) -> Any:
    import msgspec

    front = msgspec.structs.replace(config.front, port=free_port(), control_port=free_port())
    return msgspec.structs.replace(config, front=front)


@pytest.fixture
async def api(bench: Bench) -> AsyncIterator[Api]:
    async with open_session(DEADLINE_S + 30) as session:
        api = Api(bench.parts.url, session)
        await all_usable(api, ENGINES)
        yield api
        await all_usable(api, ENGINES)
        await api.idle(30.0)


@pytest.fixture
async def plain(bench: Bench, api: Api) -> Api:
    return Api(bench.plain.url, api.session)


async def under_load(api: Api, plain: Api, seed: str, turns: int, harm: Any) -> Load:
    return await loaded(api, plain, seed, turns, harm, DEADLINE_S)


async def test_killed_pe(bench: Bench, api: Api, plain: Api) -> None:
    """Another PE takes over; the restarted one is used again."""

    async def harm() -> None:
        bench.parts.kill("pe0")
        bench.parts.start("pe0")

    load = await under_load(api, plain, "pe", 3, harm)
    assert load.refused == 0
    await all_usable(api, ENGINES)
    await api.idle(30.0)
    before = await api.state()
    await asyncio.gather(*(load.agent(load.words(200), 1) for _ in range(8)))
    assert grown(before, await api.idle(30.0), "push_miss_bytes")["pe0"] > 0


async def test_killed_de(bench: Bench, api: Api, plain: Api) -> None:
    """The only DE: what had not answered waits for its replacement."""

    async def harm() -> None:
        bench.parts.kill("de0")
        bench.parts.start("de0")

    load = await under_load(api, plain, "de", 2, harm)
    assert load.refused == 0


async def test_stopped_pe_writes_nothing_when_it_goes_on(
    bench: Bench, api: Api, plain: Api
) -> None:
    """Stopped for longer than every transfer deadline, then continued under load."""

    async def harm() -> None:
        bench.parts.signal("pe1", signal.SIGSTOP)
        await asyncio.sleep(10.0)
        bench.parts.signal("pe1", signal.SIGCONT)

    await under_load(api, plain, "stop", 3, harm)


async def test_front_restarts(bench: Bench, api: Api, plain: Api) -> None:
    """Clients lose their connections; engines let go of everything, come back and hit."""
    load = Load(api, plain, "front", DEADLINE_S)
    prompts = await load.warm()
    body = {"model": "tiny", "prompt": prompts[0] + load.words(900), "max_tokens": 100}
    lost = asyncio.create_task(api.post("/v1/completions", body))
    await asyncio.sleep(0.7)
    bench.parts.kill("front")
    with pytest.raises(aiohttp.ClientError):
        await lost
    bench.parts.start("front")
    await all_usable(api, ENGINES)
    await api.idle(30.0)
    answer = await api.complete(prompts[1] + load.words(10), 4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 14 * BLOCK
    assert answer["choices"][0]["token_ids"]


async def test_whole_cluster_restarts_and_hits(bench: Bench, api: Api, plain: Api) -> None:
    load = Load(api, plain, "all", DEADLINE_S)
    prompt = load.words(9 * BLOCK + 3)
    first = await api.tokens(prompt, 70)
    await api.idle()
    for name in ("front", "pe0", "pe1", "de0"):
        bench.parts.kill(name)
    for name in ("front", "pe0", "pe1", "de0"):
        bench.parts.start(name)
    await all_usable(api, ENGINES)
    longer = prompt + first + load.words(20)
    answer = await api.complete(longer, 8)
    assert answer["choices"][0]["token_ids"] == await plain.tokens(longer, 8)
    stored = (len(prompt) + 70 - 1) // BLOCK * BLOCK
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == stored
