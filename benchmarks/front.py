"""What the front adds to a request and to a streamed token.

    python benchmarks/front.py --json

A real front (``dualpath serve``) and, for want of engines that answer in microseconds, the
integration tests' stand-in engines: one PE and one DE in a process of their own that speak the
real control protocol and vLLM's HTTP answers and compute nothing. So this measures the front, not
vLLM; ``--url`` and ``--direct-url`` measure running servers instead (a cluster and a plain vLLM).

The same requests go to the front and directly to the DE's HTTP server, in turns, over kept
connections. Through the front a request is: tokenise (chat only), schedule, open both sessions,
one HTTP request to the PE, one to the DE, wait until its blocks are durable. Each client at a time
sends one request after the other; ``overhead`` is the difference of the medians (and of the 99th
percentiles). Answers of two lengths give the part per token; ``cpu_ms`` is the front process's
own CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing as mp
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from common import arguments, finish, machine, quantile, say, table
from dualpath import config as cluster

TESTS = Path(__file__).resolve().parent.parent / "tests" / "integration"
START_S = 60.0
REQUEST_S = 120.0
TARGET_MS = 1.0
_seeds = itertools.count()  # no prompt comes twice: none is a hit


# ---- what is measured -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request, and how many clients send it."""

    kind: str
    tokens: int
    clients: int


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and the model's name there."""

    url: str
    model: str


def body_of(case: Case, model: str, prompt_tokens: int, rng: random.Random) -> dict[str, Any]:
    """A streamed request with a prompt nobody has sent before."""
    body: dict[str, Any] = {
        "model": model, "stream": True, "max_tokens": case.tokens, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    if case.kind == "chat":
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=prompt_tokens))
        return {**body, "messages": [{"role": "user", "content": text}]}
    return {**body, "prompt": [rng.randrange(97, 123) for _ in range(prompt_tokens)]}


async def timed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first event and to the end."""
    begin = time.perf_counter()
    first = 0.0
    async with http.post(url, json=body, headers={"x-request-id": uuid.uuid4().hex}) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: HTTP {response.status}: {await response.text()}")
        tail = b""
        async for piece in response.content.iter_any():
            first = first or time.perf_counter() - begin
            tail = piece
    if not tail.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"{url}: the stream ended with {tail[-200:]!r}")
    return first, time.perf_counter() - begin


async def batch(place: Place, case: Case, requests: int, prompt: int) -> list[Any]:
    """``(first, total)`` seconds of ``requests`` requests by ``case.clients`` clients."""
    path = "/v1/chat/completions" if case.kind == "chat" else "/v1/completions"
    rng = random.Random(next(_seeds))
    bodies = [body_of(case, place.model, prompt, rng) for _ in range(requests)]
    times: list[tuple[float, float]] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_S)) as http:

        async def client() -> None:
            while bodies:
                times.append(await timed(http, place.url + path, bodies.pop()))

        async with asyncio.TaskGroup() as group:
            for _ in range(case.clients):
                group.create_task(client())
    return times


async def compare(
    front: Place, direct: Place, case: Case, args: Any, cpu: Callable[[], float] | None
) -> dict[str, Any]:
    """A row."""
    front_s: list[tuple[float, float]] = []
    direct_s: list[tuple[float, float]] = []
    cpu_s = 0.0
    for number in range(args.rounds):
        order = ("front", "direct") if number % 2 else ("direct", "front")
        for side in order:
            place = front if side == "front" else direct
            before = cpu() if cpu else 0.0
            times = await batch(place, case, args.requests, args.prompt)
            if side == "front":
                cpu_s += (cpu() if cpu else 0.0) - before
                front_s += times
            else:
                direct_s += times
    row: dict[str, Any] = {"kind": case.kind, "tokens": case.tokens, "clients": case.clients}
    for at, name in ((0, "first"), (1, "total")):
        for share in (0.5, 0.99):
            ours = quantile([sample[at] for sample in front_s], share) * 1e3
            theirs = quantile([sample[at] for sample in direct_s], share) * 1e3
            label = f"{name}_p{share * 100:.0f}"
            row |= {f"{label}_ms": ours, f"direct_{label}_ms": theirs}
            row[f"overhead_{label}_ms"] = ours - theirs
    if cpu:
        row["cpu_ms"] = cpu_s / len(front_s) * 1e3
    return row


def per_token(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Overhead split into a part per request and one per token, from answers of two lengths."""
    found = []
    for short in rows:
        for long in rows:
            same = all(short[key] == long[key] for key in ("kind", "clients"))
            if not same or short["tokens"] >= long["tokens"]:
                continue
            more = long["tokens"] - short["tokens"]
            entry: dict[str, Any] = {key: short[key] for key in ("kind", "clients")}
            for key, name in (("overhead_total_p50_ms", "overhead_p50"), ("cpu_ms", "cpu")):
                if key in short:
                    token_ms = (long[key] - short[key]) / more
                    entry[f"{name}_token_us"] = token_ms * 1e3
                    entry[f"{name}_request_ms"] = short[key] - token_ms * short["tokens"]
            entry["target_ms"] = TARGET_MS
            entry["met"] = entry["overhead_p50_request_ms"] < TARGET_MS
            found.append(entry)
    return found


# ---- the servers ------------------------------------------------------------------------------


def run_engines(conn: Connection, control_port: int) -> None:
    """A PE and a DE of the integration tests, until the pipe closes."""
    sys.path.insert(0, str(TESTS))
    from fake_engine import FakeEngine, Shared  # noqa: PLC0415 - not a package; child only

    from dualpath.config import Role  # noqa: PLC0415

    async def main() -> None:
        shared = Shared()
        engines = [
            await FakeEngine(shared, role, 0, node, control_port).start()
            for role, node in ((Role.PREFILL, "p0"), (Role.DECODE, "d0"))
        ]
        for engine in engines:
            engine.report_interval_s = 0.25  # as real ones
        conn.send(engines[1].url)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(conn.fileno(), ended.set)
        await ended.wait()
        for engine in engines:
            await engine.stop()
        if shared.faults:
            raise RuntimeError(f"the front broke the protocol: {shared.faults[:3]}")

    asyncio.run(main())


@contextlib.asynccontextmanager
async def stand_ins(folder: Path) -> AsyncIterator[tuple[Place, Place, psutil.Process]]:
    """The front and the DE's own server."""
    sys.path.insert(0, str(TESTS))
    from front_kit import free_port, make_config  # noqa: PLC0415 - not a package

    port = free_port()
    described = make_config(
        folder,
        front={"port": port},
        scheduler={"fetch_interval": "50ms", "report_timeout": "10s"},
        timeouts={"request": f"{REQUEST_S:.0f}s", "admission": "30s"},
    )
    file = folder / "cluster.toml"
    file.write_text(cluster.dump(described))
    program = [sys.executable, "-m", "dualpath.cli.main", "serve", "--config", str(file)]
    with (folder / "front.log").open("wb") as log:
        front = subprocess.Popen(program, stdout=log, stderr=log)  # noqa: ASYNC220 - once
    url = f"http://127.0.0.1:{port}"
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    try:
        await until(f"{url}/health", front, folder)
        engines = context.Process(
            target=run_engines, args=(theirs, described.front.control_port), daemon=True
        )
        engines.start()
        theirs.close()
        try:
            if not await asyncio.to_thread(ours.poll, START_S):
                raise RuntimeError("the engines did not start")
            direct = ours.recv()
            await until(f"{url}/ready", front, folder)
            yield Place(url, "fake"), Place(direct, "fake"), psutil.Process(front.pid)
        finally:
            ours.close()
            engines.join(10)
            if engines.exitcode != 0:
                raise RuntimeError("the stand-in engines met an error, see above")
    finally:
        front.terminate()
        try:
            front.wait(20)
        except subprocess.TimeoutExpired:
            front.kill()


async def until(url: str, front: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a 200."""
    end = time.monotonic() + START_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < end:
            if front.poll() is not None:
                raise RuntimeError((folder / "front.log").read_text()[-2000:])
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"{url} does not answer 200")


def cpu_of(process: psutil.Process) -> float:
    """Seconds on a core so far, of all its threads. Not psutil's: those go by the clock tick of
    10 ms, which a fast machine's few requests do not take."""
    total_ns = 0
    for thread in process.threads():
        # A thread may end between the two looks.
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process.pid}/task/{thread.id}/schedstat").read_text()
            total_ns += int(stat.split()[0])
    return total_ns / 1e9


# ---- all of it --------------------------------------------------------------------------------


async def measure(args: Any) -> dict[str, Any]:
    """All rows."""
    result: dict[str, Any] = {"machine": machine(), "requests": args.requests * args.rounds}
    with tempfile.TemporaryDirectory(prefix="dualpath-bench-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            cpu = None
            if args.url:
                result["upstream"] = f"{args.url} against {args.direct_url}"
                front = Place(args.url, args.model)
                direct = Place(args.direct_url, args.direct_model or args.model)
            else:
                result["upstream"] = "stand-in engines of tests/integration: no model, no KV"
                servers = stand_ins(Path(folder))
                front, direct, process = await stack.enter_async_context(servers)
                cpu = lambda: cpu_of(process)  # noqa: E731
            rows = []
            for kind in args.kinds:
                for clients in args.clients:
                    for tokens in args.tokens:
                        case = Case(kind, tokens, clients)
                        say(str(case))
                        for place in (front, direct):  # connections, caches of the interpreter
                            await batch(place, case, max(8, clients), args.prompt)
                        rows.append(await compare(front, direct, case, args, cpu))
    result["rows"] = rows
    result["split"] = per_token(rows)
    return result


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=100, help="in a round, to each side")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 72])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--kinds", nargs="+", default=["completion", "chat"],
                        choices=["completion", "chat"])  # fmt: skip
    parser.add_argument("--url", help="a running cluster instead, and ...")
    parser.add_argument("--direct-url", help="... a plain vLLM with the same model")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--direct-model", help="its name there, if another")
    args = parser.parse_args()
    if bool(args.url) != bool(args.direct_url):
        parser.error("--url and --direct-url go together")
    result = asyncio.run(measure(args))
    table(result["rows"], ["kind", "tokens", "clients", "first_p50_ms", "direct_first_p50_ms",
                           "total_p50_ms", "direct_total_p50_ms", "overhead_first_p50_ms",
                           "overhead_total_p50_ms", "overhead_total_p99_ms", "cpu_ms"])  # fmt: skip
    for line in result["split"]:
        print(json.dumps(line))
    finish(result, args.json)


if __name__ == "__main__":
    main()
