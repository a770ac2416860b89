"""The peers' router against engines that speak vLLM's HTTP and compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from fake_model import generate

from dualpath.lab.peers.kept import Keeping
from dualpath.lab.peers.router import Router
from dualpath.lab.peers.turns import Turn, TurnFailed
from dualpath.workload.agents import token_agents
from dualpath.workload.client import Endpoint
from dualpath.workload.options import ReplayOptions, ReplayResult
from dualpath.workload.replay import replay
from dualpath.workload.trace import Round, Trajectory

pytestmark = pytest.mark.integration

TRACE = [Trajectory("a", (Round(40, 6, 0.0), Round(30, 1, 0.0), Round(10, 4, None)))]


@dataclass
class Engine:
    """One engine. ``wrong_first``: token 1 differs from what the model says; ``status``: of every
    answer."""

    name: str
    wrong_first: bool = False
    status: int = 200
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        ids = generate(body["prompt"], body["max_tokens"])
        if self.wrong_first:
            ids[0] = 1
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        if not body.get("stream"):
            params = {
                "remote_engine_id": self.name,
                "turn": len(self.bodies),
                "remote_num_tokens": len(body["prompt"]) + len(ids) - 1,
            }
            choice = {"index": 0, "text": bytes(ids).decode(), "token_ids": ids}
            return web.json_response(
                {"choices": [choice], "usage": usage, "kv_transfer_params": params}
            )
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for start in range(0, len(ids), 2):  # two tokens an event
            piece = ids[start : start + 2]
            choice = {"index": 0, "text": bytes(piece).decode(), "token_ids": piece}
            await self._send(response, {"choices": [choice]})
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/health", engine.health)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = "http://{}:{}".format(*runner.addresses[0][:2])
        yield engine
    finally:
        await runner.cleanup()


@dataclass
class Peer:
    prefill: Engine
    decode: Engine
    url: str


@contextlib.asynccontextmanager
async def peer(keep_s: float | None = None, **decode: Any) -> AsyncIterator[Peer]:
    async with (
        serving(Engine("p")) as prefill,
        serving(Engine("d", **decode)) as decoder,
    ):
        keeping = None if keep_s is None else Keeping(keep_s)
        app = Router([prefill.url], [decoder.url], keeping).app()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            async with asyncio.timeout(10):
                while not server.started:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
            try:
                yield Peer(prefill, decoder, f"http://127.0.0.1:{listener.getsockname()[1]}")
            finally:
                server.should_exit = True
                await asyncio.wait_for(task, 10)


async def run(found: Peer) -> ReplayResult:
    return await replay(token_agents(TRACE, 2, seed=3), ReplayOptions(found.url, timeout_s=20.0))


def check_answers(found: Peer, result: ReplayResult) -> None:
    """Every answer is the model's, each token once."""
    assert result.ok and not result.figures.failed
    prompts = {len(body["prompt"]): 0 for body in found.decode.bodies}
    assert len(prompts) == 3
    by_prompt = {tuple(body["prompt"]): body["max_tokens"] for body in found.decode.bodies}
    right = sorted(tuple(generate(list(prompt), count)) for prompt, count in by_prompt.items())
    assert sorted(record.token_ids or () for record in result.records) == right
    assert sorted(record.text for record in result.records) == sorted(
        bytes(ids).decode() for ids in right
    )


@pytest.mark.parametrize("keep_s", [None, 60.0])
async def test_tokens_are_the_decode_engines_and_the_first_is_sent_once(
    keep_s: float | None,
) -> None:
    async with peer(keep_s) as found:
        result = await run(found)
        check_answers(found, result)
        for before, after in zip(found.prefill.bodies, found.decode.bodies, strict=True):
            assert before["max_tokens"] == 1 and not before.get("stream")
            assert before["kv_transfer_params"]["do_remote_decode"] is True
            assert bool(after.get("stream")) is (keep_s is None)
        numbers = {body["kv_transfer_params"]["turn"] for body in found.decode.bodies}
        assert numbers == set(range(1, 7))  # each prefill's answer once
        assert all(
            body["kv_transfer_params"]["remote_engine_id"] == "p" for body in found.decode.bodies
        )


async def test_a_later_turn_is_told_which_decode_engine_keeps_the_one_before() -> None:
    async with peer(60.0) as found:
        await run(found)
        by_length = [
            (len(body["prompt"]), body["kv_transfer_params"]) for body in found.prefill.bodies
        ]
    fresh = [params for length, params in by_length if length == 40]
    later = [(length, params) for length, params in by_length if length > 40]
    assert len(fresh) == 2 and len(later) == 4
    assert all("remote_engine_id" not in params for params in fresh)
    for length, params in later:
        assert params["remote_engine_id"] == "d"
        assert params["do_remote_decode"] is True and params["do_remote_prefill"] is False
        # All of the turn before but its last token, whose KV nobody has computed.
        assert params["remote_num_tokens"] == {76: 45, 87: 76}[length]


async def test_without_keeping_no_turn_is_told_of_another() -> None:
    async with peer() as found:
        await run(found)
        for body in found.prefill.bodies:
            assert body["kv_transfer_params"] == {
                "do_remote_decode": True, "do_remote_prefill": False,
            }  # fmt: skip


async def test_what_is_forgotten_is_neither_kept_nor_of_the_same_salt() -> None:
    async with peer(60.0) as found:
        await run(found)
        async with Endpoint(found.url) as endpoint:
            status, _ = await endpoint.post("/forget", {}, 10.0)
        assert status == 200
        before = {body["cache_salt"] for body in found.prefill.bodies + found.decode.bodies}
        found.prefill.bodies.clear()
        await run(found)
        after = {body["cache_salt"] for body in found.prefill.bodies}
        fresh = [
            body["kv_transfer_params"] for body in found.prefill.bodies if len(body["prompt"]) == 40
        ]
    assert len(before) == len(after) == 1 and before.isdisjoint(after)
    assert all("remote_engine_id" not in params for params in fresh)


@pytest.mark.parametrize("keep_s", [None, 60.0])
async def test_engines_that_disagree_about_token_1_fail_the_request(keep_s: float | None) -> None:
    async with peer(keep_s, wrong_first=True) as found:
        result = await run(found)
    assert result.figures.failed == 2
    assert "token 1 is" in (result.figures.first_error or "")


async def test_an_engines_refusal_reaches_the_client() -> None:
    async with peer() as found:
        found.prefill.status = 400
        result = await run(found)
        assert result.figures.failures == {"refused": 2}
        assert "no" in (result.figures.first_error or "")
        found.prefill.status, found.decode.status = 200, 500
        result = await run(found)
        assert result.figures.failures == {"server": 2}


async def test_an_engine_that_is_silent_is_named_with_what_happened() -> None:
    timeout = aiohttp.ClientTimeout(total=0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = "http://{}:{}".format(*silent.getsockname())
        async with aiohttp.ClientSession(timeout=timeout) as session:
            turn = Turn(session, {"prompt": [1], "max_tokens": 2}, "salt", None)
            with pytest.raises(TurnFailed, match=f"^{url}: TimeoutError$"):
                await turn.prefill(url, 0.0)


async def test_health_is_that_of_all_engines_and_what_cannot_be_routed_is_refused() -> None:
    async with peer() as found, Endpoint(found.url) as endpoint:
        assert (await endpoint.get("/health", 10.0))[0] == 200
        found.decode.status = 503
        assert (await endpoint.get("/health", 10.0))[0] == 503
        body = {"prompt": "text", "stream": True, "max_tokens": 1}
        assert (await endpoint.post("/v1/completions", body, 10.0))[0] == 400
        body = {"prompt": [1], "stream": False, "max_tokens": 1}
        assert (await endpoint.post("/v1/completions", body, 10.0))[0] == 400
    assert not found.prefill.bodies
