"""Full KV load between nodes: a program, one process in each of two nodes, writing to each other.

KV is moved by the same transfer agents as an engine's, a few pieces at a time, each written anew as
soon as it is through. The two find each other through files in a folder. Lines on standard input
switch the load ``on`` and ``off``; each, and the two's first meeting, is answered by a JSON line
with the bytes written so far. The program ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dualpath.config import ClusterConfig, load
from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.class_agent import class_agent
from dualpath.transfer.memory import Region
from dualpath.transfer.qos.classes import TrafficClass

# Together half a MiB: what waits behind model traffic waits long, and must not time out for that.
_PIECE_BYTES = 128 << 10
_PIECES = 4
_TRANSFER_S = 120.0
_MEET_S = 60.0
_MEET_POLL_S = 0.05


async def follow(config: ClusterConfig, folder: Path, node: str, peer: str) -> None:
    """Do as standard input says.

    Raises:
        ValueError: no node is called so.
        TimeoutError: the peer does not appear, or a transfer takes too long.
        TransferError: a transfer failed.
    """
    (where,) = (one for one in config.nodes if one.name == node)
    with Region(_PIECE_BYTES * _PIECES * 2) as region:
        async with class_agent(f"{node}/load", config, where, TrafficClass.KV) as agent:
            agent.register(region)
            landing = region.address + _PIECE_BYTES * _PIECES
            _publish(folder / f"{node}.json", agent, landing)
            about = await asyncio.to_thread(_peer, folder / f"{peer}.json")
            name = f"{peer}/load"
            agent.add_peer(name, bytes.fromhex(about["metadata"]))
            switched_on = asyncio.Event()
            lanes = [
                asyncio.create_task(
                    _repeat(agent, switched_on, name, region.address + at, about["landing"] + at)
                )
                for at in range(0, _PIECE_BYTES * _PIECES, _PIECE_BYTES)
            ]
            _answer(agent)
            async for line in _lines():
                if line == "on":
                    switched_on.set()
                else:
                    switched_on.clear()
                for lane in lanes:
                    if lane.done():
                        lane.result()
                _answer(agent)
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)


async def _repeat(
    agent: PeerAgent, switched_on: asyncio.Event, peer: str, local: int, remote: int
) -> None:
    while True:
        await switched_on.wait()
        transfer = agent.submit(Op.WRITE, peer, [local], [remote], _PIECE_BYTES)
        await transfer.wait(_TRANSFER_S)


def _answer(agent: PeerAgent) -> None:
    written = int(agent.counters().get("write_bytes", 0))
    print(json.dumps({"written_bytes": written}), flush=True)


def _publish(path: Path, agent: PeerAgent, landing: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"metadata": agent.metadata().hex(), "landing": landing}))
    part.rename(path)


def _peer(path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + _MEET_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path}: the other node does not appear")
        time.sleep(_MEET_POLL_S)
    about: dict[str, Any] = json.loads(path.read_text())
    return about


async def _lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("node")
    parser.add_argument("peer")
    options = parser.parse_args()
    config = load(options.config)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(follow(config, options.folder, options.node, options.peer))


if __name__ == "__main__":
    main()
