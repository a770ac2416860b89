"""A PE's push to a DE through the transfer agent, against a raw TCP socket on the same path.

    python benchmarks/push.py --json

Two processes on this machine over loopback TCP, as between hosts without RDMA (``TLS=tcp``: UCX
would otherwise copy between the processes directly). The sender writes ``--total-mib`` from its
memory into the receiver's, in ranges of one size that do not merge, a window of transfers at a
time. The raw socket sends the same bytes from the same kind of memory: ``same`` with one send per
range, ``large`` with sends of 4 MiB, received into memory of the same size; it ends when the
receiver has said that it has everything. CPU seconds are of the processes, user and system, per GB
(1e9 bytes), of each side.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from common import Sample, alternate, arguments, finish, machine, median, paired_ratio, say, table
from dualpath.transfer.agent import Op, PeerAgent
from dualpath.transfer.memory import Region

MEMORY_BYTES = 64 << 20
LARGE_BYTES = 4 << 20
TARGET = 0.7
TIMEOUT_S = 60.0


def cpu_s() -> float:
    """User and system time of this process."""
    return time.process_time()


# ---- the receiver's process -------------------------------------------------------------------


def receive_writes(conn: Connection) -> None:
    """An agent that serves a writer until the pipe closes; answers ``cpu`` with its CPU time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        with Region(MEMORY_BYTES, populate=True) as region:
            async with PeerAgent(f"receiver/{os.getpid()}", device="lo", transports="tcp") as agent:
                agent.register(region)
                conn.send((agent.name, agent.metadata(), region.address))

                def command() -> None:
                    try:
                        what, *args = conn.recv()
                    except EOFError:
                        ended.set()
                        return
                    if what == "peer":
                        agent.add_peer(*args)
                    conn.send(cpu_s())

                loop.add_reader(conn.fileno(), command)
                await ended.wait()
                loop.remove_reader(conn.fileno())

    asyncio.run(main())


def receive_bytes(conn: Connection) -> None:
    """A raw socket's receiver: for every ``(bytes, step)`` takes that many, then says so."""
    with socket.create_server(("127.0.0.1", 0)) as server, Region(MEMORY_BYTES, populate=True) as r:
        conn.send(server.getsockname()[1])
        peer, _ = server.accept()
        memory = r.view()
        with peer:
            while True:
                try:
                    what, *args = conn.recv()
                except EOFError:
                    break
                if what == "cpu":
                    conn.send(cpu_s())
                    continue
                left, step = args
                while left:
                    at = 0
                    while at < MEMORY_BYTES and left:
                        got = peer.recv_into(memory[at : at + min(step, left)])
                        if not got:
                            raise EOFError("the sender left")
                        at, left = at + got, left - got
                peer.sendall(b"!")
        memory.release()


def start(work: Callable[[Connection], None]) -> tuple[Connection, mp.process.BaseProcess]:
    """A receiver in a process of its own."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(TIMEOUT_S):
        raise RuntimeError("the receiver did not start")
    return ours, process


def ask(conn: Connection, *message: Any) -> Any:
    """Send, and wait for the answer."""
    conn.send(message)
    if not conn.poll(TIMEOUT_S):
        raise RuntimeError("the receiver says nothing")
    return conn.recv()


def sample(nbytes: int, took_s: float, ours_s: float, theirs_s: float) -> Sample:
    """Figures of one measurement."""
    return {
        "gbs": nbytes / took_s / 1e9,
        "sender_cpu_s_per_gb": ours_s / nbytes * 1e9,
        "receiver_cpu_s_per_gb": theirs_s / nbytes * 1e9,
    }


# ---- the sender's side ------------------------------------------------------------------------


class Push:
    """The transfer agent, as a PE uses it."""

    def __init__(self, agent: PeerAgent, region: Region, conn: Connection, name: str, far: int):
        self._agent = agent
        self._region = region
        self._conn = conn
        self._name = name
        self._far = far

    async def run(self, range_bytes: int, total: int, per_transfer: int, window: int) -> Sample:
        """Write ``total`` bytes in transfers of ``per_transfer`` bytes, ``window`` at a time."""
        count = MEMORY_BYTES // range_bytes
        shuffled = random.Random(1).sample(range(count), count)  # neighbours never merge
        each = max(1, per_transfer // range_bytes)
        theirs_s, ours_s, begin = ask(self._conn, "cpu"), cpu_s(), time.perf_counter()
        under_way: set[asyncio.Future[None]] = set()
        at = sent = 0
        while sent < total or under_way:
            while sent < total and len(under_way) < window:
                local = [self._region.address + (at + i) % count * range_bytes for i in range(each)]
                remote = [self._far + shuffled[(at + i) % count] * range_bytes for i in range(each)]
                transfer = self._agent.submit(Op.WRITE, self._name, local, remote, range_bytes)
                under_way.add(asyncio.ensure_future(transfer.wait(TIMEOUT_S)))
                at, sent = at + each, sent + each * range_bytes
            done, under_way = await asyncio.wait(
                under_way, return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S
            )
            for future in done:
                future.result()
        took_s = time.perf_counter() - begin
        ours_s = cpu_s() - ours_s
        return sample(sent, took_s, ours_s, ask(self._conn, "cpu") - theirs_s)


@contextlib.asynccontextmanager
async def pushing() -> AsyncIterator[Push]:
    """A pair of agents that know each other."""
    conn, process = start(receive_writes)
    name, metadata, far = conn.recv()
    try:
        with Region(MEMORY_BYTES, populate=True) as region:
            region.view()[:] = random.Random(2).randbytes(1 << 20) * (MEMORY_BYTES >> 20)
            async with PeerAgent(f"sender/{os.getpid()}", device="lo", transports="tcp") as agent:
                agent.register(region)
                agent.add_peer(name, metadata)
                ask(conn, "peer", agent.name, agent.metadata())
                yield Push(agent, region, conn, name, far)
    finally:
        conn.close()
        process.join(10)
        process.kill()


@contextlib.contextmanager
def raw_socket() -> Any:
    """A function that sends ``total`` bytes in steps."""
    conn, process = start(receive_bytes)
    try:
        with (
            socket.create_connection(("127.0.0.1", conn.recv())) as sock,
            Region(MEMORY_BYTES, populate=True) as region,
        ):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            memory = region.view()
            memory[:] = random.Random(2).randbytes(1 << 20) * (MEMORY_BYTES >> 20)

            def run(step: int, total: int) -> Sample:
                theirs_s, ours_s, begin = ask(conn, "cpu"), cpu_s(), time.perf_counter()
                conn.send(("take", total, step))
                for at in range(0, total, step):
                    offset = at % MEMORY_BYTES
                    sock.sendall(memory[offset : offset + step])
                if sock.recv(1) != b"!":
                    raise RuntimeError("the receiver left")
                took_s = time.perf_counter() - begin
                ours_s = cpu_s() - ours_s
                return sample(total, took_s, ours_s, ask(conn, "cpu") - theirs_s)

            yield run
            memory.release()
    finally:
        conn.close()
        process.join(10)
        process.kill()


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--range-kib", type=int, nargs="+", default=[64, 128, 256, 1024, 4096])
    parser.add_argument("--total-mib", type=int, default=512, help="bytes of a measurement")
    parser.add_argument("--transfer-mib", type=int, default=8, help="bytes of one transfer")
    parser.add_argument("--window", type=int, default=4, help="transfers at a time")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "path": "loopback TCP"}
    rows: list[dict[str, Any]] = []
    total = args.total_mib << 20
    with raw_socket() as raw, asyncio.Runner() as runner:
        context = pushing()
        push = runner.run(context.__aenter__())

        def pushed(nbytes: int) -> Sample:
            return runner.run(push.run(nbytes, total, args.transfer_mib << 20, args.window))

        try:
            pushed(1 << 20)  # connects
            raw(LARGE_BYTES, total)
            for size in (kib << 10 for kib in args.range_kib):
                say(f"ranges of {size >> 10} KiB")
                samples = alternate(
                    {
                        "push": lambda size=size: pushed(size),  # type: ignore[misc]
                        "same": lambda size=size: raw(size, total),  # type: ignore[misc]
                        "large": lambda: raw(LARGE_BYTES, total),
                    },
                    args.rounds,
                )
                row: dict[str, Any] = {"range_bytes": size}
                for key in ("gbs", "sender_cpu_s_per_gb", "receiver_cpu_s_per_gb"):
                    row[key] = median(samples["push"], key)
                    row[f"raw_{key}"] = median(samples["large"], key)
                row["of_same"] = paired_ratio(samples["push"], samples["same"], "gbs")
                row["of_large"] = paired_ratio(samples["push"], samples["large"], "gbs")
                row["met"] = row["of_large"] >= TARGET
                rows.append(row)
        finally:
            runner.run(context.__aexit__(None, None, None))
    result["rows"] = rows
    table(rows, ["range_bytes", "gbs", "raw_gbs", "of_same", "of_large", "sender_cpu_s_per_gb",
                 "receiver_cpu_s_per_gb", "raw_sender_cpu_s_per_gb", "raw_receiver_cpu_s_per_gb",
                 "met"])  # fmt: skip
    finish(result, args.json)


if __name__ == "__main__":
    main()
