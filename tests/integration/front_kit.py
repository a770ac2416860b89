"""A front with fake engines around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import BLOCK, FakeEngine, Shared

from dualpath.config import ClusterConfig, Role, parse
from dualpath.serve import serve

PATIENCE_S = 15.0
"""How long one waits for what comes in milliseconds on a machine that is not busy otherwise."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def make_config(
    store: Path, *, prefill: int = 1, decode: int = 1, **sections: dict[str, Any] | str | bool
) -> ClusterConfig:
    """A small cluster with short deadlines."""
    data: dict[str, Any] = {
        "model": {"path": str(store / "model"), "served_name": "fake", "max_model_len": 512},
        "nodes": [
            *({"name": f"p{rank}", "role": "prefill"} for rank in range(prefill)),
            *({"name": f"d{rank}", "role": "decode"} for rank in range(decode)),
        ],
        "front": {"port": 0, "control_port": free_port()},
        "storage": {"path": str(store / "store")},
        "engine": {"block_tokens": BLOCK, "engine_block_tokens": BLOCK},
        "scheduler": {"fetch_interval": "10ms", "report_timeout": "2s"},
        "timeouts": {
            "request": "5s", "admission": "2s", "durable": "1s", "transfer": "300ms",
            "connect": "2s", "drain": "1s",
        },
    }  # fmt: skip
    for name, values in sections.items():
        if isinstance(values, dict):
            data.setdefault(name, {}).update(values)
        else:
            data[name] = values
    (store / "model").mkdir(exist_ok=True)
    return parse(data)


class FakeCluster:
    """The front's URL, a client, and the engines."""

    def __init__(
        self,
        config: ClusterConfig,
        url: str,
        http: aiohttp.ClientSession,
        front: asyncio.Task[None],
        stop: asyncio.Event,
    ) -> None:
        self.config = config
        self.front = front
        self.stop = stop
        self.url = url
        self.http = http
        self.shared = Shared()
        self.engines: dict[str, FakeEngine] = {}

    @property
    def pe(self) -> FakeEngine:
        return self.engines["pe0"]

    @property
    def de(self) -> FakeEngine:
        return self.engines["de0"]

    def engine(self, role: Role, rank: int) -> FakeEngine:
        """A new engine, not started."""
        node, _ = self.config.engines(role)[rank]
        port = self.config.front.control_port
        return FakeEngine(self.shared, role, rank, node.name, port)

    async def add(self, role: Role, rank: int) -> FakeEngine:
        """Start an engine, and wait until it may get work (or was refused)."""
        engine = self.engine(role, rank)
        self.engines[engine.name] = engine
        await engine.start()
        if engine.refused is None:
            await self.usable(engine.name, True)
        return engine

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as response:
            return await response.json(content_type=None)

    async def status(self, path: str) -> int:
        async with self.http.get(self.url + path) as response:
            return response.status

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """``(status, body, headers)``."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw else None, response.headers

    async def chat(self, text: str, **keys: Any) -> tuple[int, Any, Any]:
        """A chat request of one message."""
        body = {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return await self.post("/v1/chat/completions", {**body, **keys})

    async def stream(self, path: str, body: dict[str, Any]) -> tuple[int, list[Any], Any]:
        """``(status, events, headers)``; the last event is ``[DONE]``."""
        async with self.http.post(
            self.url + path, data=json.dumps({**body, "stream": True}).encode()
        ) as response:
            raw = await response.read()
            if response.status != 200:
                return response.status, [json.loads(raw)], response.headers
            blocks = [block for block in raw.decode().split("\n\n") if block]
            texts = [block.removeprefix("data: ") for block in blocks]
            events = [text if text == "[DONE]" else json.loads(text) for text in texts]
            return response.status, events, response.headers

    async def until(self, what: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait for something to become true."""
        async with asyncio.timeout(timeout_s):
            while not what():  # noqa: ASYNC110 - what is watched has no event
                await asyncio.sleep(0.005)

    async def usable(self, name: str, value: bool) -> None:
        """Wait until the front gives an engine work, or does not."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self._usable()).get(name) is not value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def gone(self, *names: str) -> None:
        """Wait until these engines are not connected."""
        async with asyncio.timeout(PATIENCE_S):
            while set(names) & (await self._usable()).keys():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _usable(self) -> dict[str, bool]:
        state = await self.get("/debug/state")
        return {engine["name"]: engine["usable"] for engine in state["engines"]}

    async def idle(self) -> None:
        """Wait until nothing is held anywhere, then check that nothing is and nothing was wrong."""
        async with asyncio.timeout(PATIENCE_S):
            while not _all_zero(await self.get("/debug/state")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert self.shared.faults == [], self.shared.faults
        assert self.shared.writers == {}
        assert all(engine.sessions == {} for engine in self.engines.values())


def _all_zero(state: dict[str, Any]) -> bool:
    scheduler = state["scheduler"]
    return (
        state["requests_open"] == state["sessions_closing"] == 0
        and scheduler["waiting_prefill"] == scheduler["waiting_decode"] == 0
        and scheduler["assigned"] == 0
        and all(
            engine["tok"] == engine["seq"] == engine["read_q"] == 0
            for engine in scheduler["engines"]
        )
        and all(
            engine["open_sessions"] == [] and engine["stats"]["sessions"] == 0
            for engine in state["engines"]
        )
    )


@contextlib.asynccontextmanager
async def running_front(config: ClusterConfig) -> AsyncIterator[FakeCluster]:
    """A front without engines; it ends in order, and so do the engines."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    front = asyncio.create_task(serve(config, ready=url.set_result, stop=stop))
    async with aiohttp.ClientSession() as http:
        await asyncio.wait({front, url}, return_when=asyncio.FIRST_COMPLETED)
        if front.done():
            await front
        cluster = FakeCluster(config, url.result(), http, front, stop)
        try:
            yield cluster
        finally:
            stop.set()
            try:
                async with asyncio.timeout(10):
                    await front
            finally:
                for engine in cluster.engines.values():
                    await engine.stop()


@contextlib.asynccontextmanager
async def running_cluster(config: ClusterConfig) -> AsyncIterator[FakeCluster]:
    """A front with the first PE and the first DE of its description."""
    async with running_front(config) as cluster:
        await cluster.add(Role.PREFILL, 0)
        await cluster.add(Role.DECODE, 0)
        yield cluster
