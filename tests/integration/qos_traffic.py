"""Traffic of both classes between two network namespaces: a program, one process at each end.

``target FOLDER HOST`` receives: NIXL writes into its memory, and a plain TCP port. ``source FOLDER
HOST`` sends while it is told to: a line on stdin, ``kv on``, ``kv off``, ``model on``, ``model
off``, is answered by one with the bytes sent so far by each. Both end with their stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dualpath.config import load
from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.class_agent import class_agent
from dualpath.transfer.memory import Region
from dualpath.transfer.qos.classes import TrafficClass

CLUSTER_FILE = "cluster.toml"
READY_FILE = "target.json"
DEVICE = "cn0"
MODEL_PORT = 9000
_KV_BYTES = 1 << 20
_KV_AT_ONCE = 4
_CHUNK = bytes(256 << 10)
_SEND_BUFFER_BYTES = 8 << 20
_SO_SNDBUFFORCE = 32
"""Linux's number (asm-generic/socket.h); Python has no name for it."""
_START_S = 30.0
_TRANSFER_S = 120.0
"""KV's share is small: a piece may take long, and must not fail for that."""


def kv_agent(folder: Path, name: str, node_index: int) -> PeerAgent:
    """An agent of KV's class, as an engine makes it."""
    config = load(folder / CLUSTER_FILE)
    return class_agent(name, config, config.nodes[node_index], TrafficClass.KV)


async def commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def target(folder: Path, host: str) -> None:
    async def discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()

    with Region(_KV_BYTES * _KV_AT_ONCE) as region:
        async with kv_agent(folder, "target/1", 1) as agent:
            agent.register(region)
            server = await asyncio.start_server(discard, host, MODEL_PORT, limit=1 << 20)
            about = {"metadata": agent.metadata().hex(), "address": region.address}
            part = folder / f"{READY_FILE}.part"
            part.write_text(json.dumps(about))
            part.rename(folder / READY_FILE)
            await (await commands()).read()
            server.close()


class ModelTraffic:
    """A thread that fills a plain TCP connection while it is switched on."""

    def __init__(self, host: str) -> None:
        self.sent_bytes = 0
        self.on = threading.Event()
        self._host = host
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.on.wait()
        with socket.create_connection((self._host, MODEL_PORT), _START_S) as connection:
            # Enough for half a second in which this process does not get a core.
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER_BYTES)
            while True:
                self.on.wait()
                self.sent_bytes += connection.send(_CHUNK)


class KvTraffic:
    """Transfers of KV's class, a few at once, while it is switched on."""

    def __init__(self, agent: PeerAgent, peer: str, local: int, remote: int) -> None:
        self.on = asyncio.Event()
        self._agent, self._peer = agent, peer
        self._tasks = [
            asyncio.create_task(self._run(local + offset, remote + offset))
            for offset in range(0, _KV_BYTES * _KV_AT_ONCE, _KV_BYTES)
        ]

    async def _run(self, local: int, remote: int) -> None:
        while True:
            await self.on.wait()
            transfer = self._agent.submit(Op.WRITE, self._peer, [local], [remote], _KV_BYTES)
            await transfer.wait(_TRANSFER_S)

    def check(self) -> None:
        """Raise what a transfer failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def polls() -> Iterator[None]:
    """A few times a second until the deadline."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.05)
    raise TimeoutError("the target does not appear")


async def source(folder: Path, host: str) -> None:
    for _ in polls():
        if (folder / READY_FILE).exists():
            break
    about = json.loads((folder / READY_FILE).read_text())
    model = ModelTraffic(host)
    with Region(_KV_BYTES * _KV_AT_ONCE) as region:
        async with kv_agent(folder, "source/1", 0) as agent:
            agent.register(region)
            agent.add_peer("target/1", bytes.fromhex(about["metadata"]))
            kv = KvTraffic(agent, "target/1", region.address, about["address"])
            lines = await commands()
            while line := (await lines.readline()).decode().split():
                chosen = {"kv": kv.on, "model": model.on}[line[0]]
                chosen.set() if line[1] == "on" else chosen.clear()
                kv.check()
                written = int(agent.counters().get("write_bytes", 0))
                print(json.dumps({"kv": written, "model": model.sent_bytes}), flush=True)
            await kv.end()


if __name__ == "__main__":
    asyncio.run({"target": target, "source": source}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3]))
