"""A small OpenAI-compatible streaming server for tests of the replay client.

It has no model: token k of an answer is a function of the prompt, so an answer is right exactly
when the prompt arrived right. What it does badly on purpose is chosen per request by ``faults``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


def answer_ids(prompt: list[int], count: int) -> list[int]:
    """Ids 100 .. 8191 that depend on every token of ``prompt``."""
    digest = hashlib.blake2b(json.dumps(prompt).encode()).digest()
    return [100 + (int.from_bytes(digest[:8], "big") + 7919 * k) % 8000 for k in range(count)]


@dataclass
class OpenAIServer:
    """State of the server; ``faults(number, body)`` names what goes wrong with a request."""

    faults: Callable[[int, dict[str, Any]], str] = lambda number, body: ""
    give_ids: bool = True
    tokens_per_chunk: int = 1
    front: dict[str, Any] | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    open_now: int = 0
    most_open: int = 0

    @property
    def prompts(self) -> list[list[int]]:
        """Token prompts in order of arrival."""
        return [body["prompt"] for body in self.bodies]

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    async def state(self, _: web.Request) -> web.Response:
        return web.json_response(self.front) if self.front else web.Response(status=404)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization", ""))
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            return await self._answer(request, body, self.faults(number, body))
        finally:
            self.open_now -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        if fault.isdigit():
            error = {"error": {"message": f"asked\nto answer {fault}", "code": int(fault)}}
            return web.json_response(error, status=int(fault))
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        chat = request.path.endswith("chat/completions")
        prompt = list(json.dumps(body["messages"]).encode()) if chat else body["prompt"]
        count = body["max_tokens"] + {"long": 1, "short": -1}.get(fault, 0)
        ids = answer_ids(prompt, count)
        response = web.StreamResponse(headers={"x-dualpath-first-token": "pe", "x-other": "no"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        if chat:
            await self._send(response, {"delta": {"role": "assistant", "content": ""}}, None)
        for start in range(0, count, self.tokens_per_chunk):
            if start and fault == "hang":
                await self.release.wait()
            if start and fault == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if start and fault == "end":
                return response
            if fault == "error" or (start and fault == "late-error"):
                await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
                return response
            if fault == "garbage":
                await response.write(b"data: {]\n\n")
            piece = ids[start : start + self.tokens_per_chunk]
            text = "".join(f" w{token}" for token in piece)
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            last = start + len(piece) == count
            choice["finish_reason"] = "length" if last else None
            await self._send(response, choice, piece if body.get("return_token_ids") else None)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count - (fault == "miscount"),
            "prompt_tokens_details": {"cached_tokens": len(prompt) // 64 * 64},
        }
        tail = json.dumps({"choices": [], "usage": usage}).encode()
        # One event in three pieces, with the other kind of line end.
        for piece_bytes in (b"data: " + tail[:9], tail[9:], b"\r\n\r\ndata: [DONE]\n\n"):
            await response.write(piece_bytes)
        return response

    async def _send(
        self, response: web.StreamResponse, choice: dict[str, Any], ids: list[int] | None
    ) -> None:
        if ids is not None and self.give_ids:
            choice["token_ids"] = ids
        body = {"choices": [{"index": 0, **choice}]}
        await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")


@asynccontextmanager
async def running(server: OpenAIServer) -> AsyncIterator[OpenAIServer]:
    """The server on a free loopback port."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/debug/state", server.state)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        server.release.set()
        await runner.cleanup()
