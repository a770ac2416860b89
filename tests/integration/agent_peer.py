"""A transfer agent in a process of its own, whose memory the test can look into directly.

The memory is a shared mapping of a file: what the test reads is what the peer's memory holds at
that moment, without asking the peer, which might first serve its connections.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing as mp
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.memory import Region

Bytes = npt.NDArray[np.uint8]

PEER_BYTES = 64 << 20
TCP = {"device": "lo", "transports": "tcp"}
"""What peers on different machines use without RDMA, but for the device."""
START_S = 30.0


def shared(path: Path) -> tuple[Region, Bytes]:
    """The file's bytes, as a region and as an array."""
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), PEER_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return Region.borrowed(address, PEER_BYTES, mapping), np.frombuffer(mapping, dtype=np.uint8)


def run_peer(conn: Connection, path: Path, name: str, options: dict[str, Any]) -> None:
    """The child: serve peers, and write or read when told to."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        region, _ = shared(path)
        transfers = []
        async with PeerAgent(name, **options) as agent:
            agent.register(region)
            conn.send((agent.metadata(), region.address))

            def command() -> None:
                try:
                    what, *args = conn.recv()
                except EOFError:  # the test is over, or died
                    ended.set()
                    return
                if what == "add":
                    agent.add_peer(*args)
                    conn.send("added")
                elif what == "submit":
                    op, peer, offset, remote, nbytes = args
                    local = [region.address + offset]
                    transfers.append(agent.submit(Op(op), peer, local, [remote], nbytes))
                    transfers[-1].done.add_done_callback(lambda _: conn.send("done"))

            loop.add_reader(conn.fileno(), command)
            await ended.wait()
            loop.remove_reader(conn.fileno())

    asyncio.run(main())


@dataclass
class Peer:
    """The test's handle on a child."""

    process: mp.process.BaseProcess
    conn: Connection
    name: str
    metadata: bytes
    address: int
    memory: Bytes

    @classmethod
    def start(cls, folder: Path, name: str, **options: Any) -> Peer:
        """Start a child and wait until it serves."""
        return cls.start_many(folder, [name], **options)[0]

    @classmethod
    def start_many(cls, folder: Path, names: list[str], **options: Any) -> list[Peer]:
        """Several at once, which takes hardly longer than one."""
        # Children are forked from a server that has imported everything and opened nothing.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["dualpath.transfer.agent", "nixl_cu12._api"])
        started = []
        for index, name in enumerate(names):
            path = folder / f"memory-{len(list(folder.iterdir()))}-{index}"
            with path.open("wb") as file:
                file.truncate(PEER_BYTES)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_peer, args=(theirs, path, name, options or TCP), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours, name, shared(path)[1]))
        peers = []
        for process, conn, name, memory in started:
            assert conn.poll(START_S), f"{name} did not start"
            metadata, address = conn.recv()
            peers.append(cls(process, conn, name, metadata, address, memory))
        return peers

    async def meet(self, agent: PeerAgent) -> None:
        """Make the two known to each other, as the front does with engines."""
        agent.add_peer(self.name, self.metadata)
        self.conn.send(("add", agent.name, agent.metadata()))
        await self.says("added")

    async def says(self, word: str) -> None:
        """Wait for the child's next message, which must be ``word``."""
        assert await asyncio.to_thread(self.conn.poll, START_S), f"{self.name} says nothing"
        assert self.conn.recv() == word

    def at(self, offset: int) -> int:
        """Address of ``offset`` in the peer's own mapping."""
        return self.address + offset

    def stop(self) -> None:
        """Freeze it: its kernel goes on answering, it does not."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``stop``."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, stopped or not."""
        self.process.kill()
        self.process.join(10)
        assert not self.process.is_alive()

    def close(self) -> None:
        """Kill and let go."""
        self.kill()
        self.conn.close()
