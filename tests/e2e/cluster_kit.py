"""Starting clusters and plain servers, calling them, and looking for what they still hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dualpath import config as cluster_config
from dualpath.config import ClusterConfig
from dualpath.serve import warden

START_S = 700.0
STOP_S = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_description(model: str, store: Path, port: int, **changes: Any) -> ClusterConfig:
    """1 PE + 1 DE, prompts chunked at 256 tokens, small buffers."""
    data: dict[str, Any] = {
        "model": {"path": model, "served_name": "tiny", "max_model_len": 2048},
        "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
        "front": {"port": port, "control_port": 0},
        "storage": {"path": str(store), "fsync": False},
        "buffers": {"prefill": "64MiB", "decode": "64MiB", "landing": "4MiB", "persist": "4MiB"},
        "engine": {
            "kv_cache": "64MiB",
            "max_batched_tokens": 256,
            "max_num_seqs": 8,
            "env": {"VLLM_SERVER_DEV_MODE": "1"},
        },
        "timeouts": {"transfer": "5s", "layer": "10s"},
    }
    data.update(changes)
    return cluster_config.parse(data)


@dataclass
class Running:
    """A process group of ours, and where it answers."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def start(argv: list[str], log: Path, url: str, env: dict[str, str] | None = None) -> Running:
    """Start a program that does not outlive this one, however this one ends: under the warden
    that engines run under, too."""
    guarded = [sys.executable, "-I", "-S", warden.__file__, str(STOP_S), *argv]
    with log.open("wb") as out:
        process = subprocess.Popen(
            guarded, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.PIPE,
            start_new_session=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
    return Running(process, url, log)


def start_cluster(config: ClusterConfig, folder: Path) -> Running:
    """``dualpath up`` with that description, not ready yet."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cluster.toml"
    file.write_text(cluster_config.dump(config))
    program = Path(sys.executable).with_name("dualpath")
    return start(
        [str(program), "up", "--config", str(file), "--run-dir", str(folder / "run")],
        folder / "up.log",
        f"http://127.0.0.1:{config.front.port}",
    )


def until_ready(running: Running, path: str, within_s: float = START_S) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if running.process.poll() is not None:
            pytest.fail(f"{running.log.name}: ended at start\n{running.tail()}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(running.url + path, timeout=10) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.3)
    pytest.fail(f"{running.log.name}: not ready within {within_s:g} s\n{running.tail()}")


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """A client whose every request has a connection of its own: servers drop idle ones after 5 s,
    and a request that meets such a moment fails without having been served."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(timeout_s), connector=aiohttp.TCPConnector(force_close=True)
    )


@dataclass
class Api:
    """A server's API, and the checks every test ends with."""

    url: str
    session: aiohttp.ClientSession
    model: str = "tiny"

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        async with self.session.post(self.url + path, json=body) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text) if text else None

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        answer: dict[str, Any] = await self.post("/v1/completions", body)
        return answer

    async def tokens(self, prompt: list[int], tokens: int, **more: Any) -> list[int]:
        answer = await self.complete(prompt, tokens, **more)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    async def state(self) -> Any:
        return await self.get("/debug/state")

    async def idle(self, within_s: float = 15.0) -> Any:
        """Wait until nothing is held anywhere; fails, saying what is."""
        end = time.monotonic() + within_s
        while True:
            state = await self.state()
            held = leftovers(state)
            if not held:
                return state
            if time.monotonic() > end:
                pytest.fail(f"still held {within_s:g} s later: {held}")
            await asyncio.sleep(0.1)


def leftovers(state: dict[str, Any]) -> list[str]:
    """What is held that should not be when nothing is under way."""
    held = [name for name in ("requests_open", "sessions_closing") if state[name]]
    for engine in state["engines"]:
        if engine["failing"]:
            held.append(f"{engine['name']}: failing: {engine['failing']}")
        held += [f"{engine['name']}: session {name}" for name in engine["open_sessions"]]
        stats = engine["stats"]
        held += [
            f"{engine['name']}: {name} = {stats[name]}"
            for name in (
                "buffer_slots_used", "hbm_tokens_used", "read_queue_tokens",
                "sessions", "transfers",
            )
            if stats.get(name)
        ]  # fmt: skip
    return held


@dataclass
class Servers:
    cluster: Running
    plain: Running
    store: Path
