"""One huge request among small hits: how much longer do the small ones wait for token 1?

    python benchmarks/fairness.py --live --json        # starts 1 PE + 1 DE with the tiny model
    dualpath up &
    python benchmarks/fairness.py --url http://127.0.0.1:8000 --json

Small requests (a few stored blocks and some new tokens) are sent one after the other, alone and
while one huge prompt after another is under way, in turns. Half of a huge prompt is stored, so it
is loaded and computed. Those sent while a huge one waits for its token 1 count as *beside*, however
long they take; as many are sent as it takes to have ``--requests`` of them. ``huge_share`` is the
part of their time in which a huge one was waiting for its token 1. ``phases_ms`` are the front's
own medians of what token 1 waits for.

The figure is the ratio of 99th percentiles, the median over rounds; the target is below 2. On few
cores it measures who shares the cores (front, engines and this program) as much as who shares the
engines: read ``machine`` beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common import arguments, finish, machine, quantile, say, table
from dualpath.cli.defaults import default_cluster
from dualpath.config import Mode
from dualpath.workload.client import Endpoint

TARGET = 2.0
REQUEST_S = 120.0
_TRIES = 5
"""Small requests sent at most for each that counts."""


@dataclass(slots=True)
class Flight:
    """A request's time from being sent to its token 1; ``end_s`` is endless before that."""

    start_s: float
    end_s: float = float("inf")

    def common_s(self, other: Flight) -> float:
        """Seconds in which both were under way."""
        return max(0.0, min(self.end_s, other.end_s) - max(self.start_s, other.start_s))


@dataclass(slots=True)
class Round:
    """Small requests, alone and beside a huge one."""

    alone: list[Flight]
    beside: list[Flight]

    def ratio(self, share: float) -> float:
        """Of quantiles, beside over alone."""
        return quantile_s(self.beside, share) / quantile_s(self.alone, share)


def quantile_s(flights: list[Flight], share: float) -> float:
    """Of their seconds to token 1."""
    return quantile([flight.end_s - flight.start_s for flight in flights], share)


class Bench:
    """A cluster and prompts of random token ids."""

    def __init__(self, endpoint: Endpoint, model: str, hit_tokens: int, huge_tokens: int) -> None:
        self._endpoint = endpoint
        self._model = model
        self._source = random.Random(7)
        self._hits = [self._words(hit_tokens) for _ in range(8)]
        self._huge_hit = self._words(huge_tokens // 2)
        self._huge_tokens = huge_tokens
        self.flights: list[Flight] = []

    def _words(self, count: int) -> list[int]:
        return [self._source.randrange(100, 40_000) for _ in range(count)]

    async def _ttft_s(self, prompt: list[int]) -> float:
        body: dict[str, Any] = {
            "model": self._model, "prompt": prompt, "max_tokens": 2, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        answer = await self._endpoint.ask("/v1/completions", body, timeout_s=REQUEST_S, retries=0)
        return answer.ttft_s

    async def store(self) -> None:
        """Have the beginnings of small and huge requests stored."""
        for prompt in (*self._hits, self._huge_hit):
            await self._ttft_s(prompt)

    async def small(self, number: int) -> Flight:
        """A small hit."""
        start_s = time.perf_counter()
        ttft_s = await self._ttft_s(self._hits[number % len(self._hits)] + self._words(10))
        return Flight(start_s, start_s + ttft_s)

    async def beside(self, count: int) -> list[Flight]:
        """``count`` small hits sent while a huge one waits for its token 1."""
        found: list[Flight] = []
        for number in range(count * _TRIES):
            huge = self.flights[-1]
            flight = await self.small(number)
            if flight.start_s < huge.end_s:
                found.append(flight)
            if len(found) == count:
                return found
        raise RuntimeError(
            f"only {len(found)} of {count * _TRIES} small requests were sent while a huge one was "
            "under way: give a longer prompt (--huge)"
        )

    async def phases_s(self, count: int) -> dict[str, float]:
        """Medians of the front's own times of the latest ``count`` small hits."""
        _, raw = await self._endpoint.get("/debug/requests", 10.0)
        small = len(self._hits[0]) + 10
        latest = [
            one["phases"]
            for one in msgspec.json.decode(raw)["requests"]
            if one["prompt_tokens"] == small and one["hit_tokens"]
        ][-count:]
        if not latest:
            raise RuntimeError("no small request hit anything: is what was sent first stored?")
        return {name: statistics.median(one[name] for one in latest) for name in latest[-1]}

    def huge_share(self, rounds: list[Round]) -> float:
        """Part of the time of small requests with a huge one under way beside them."""
        beside = [flight for one in rounds for flight in one.beside]
        shared_s = sum(flight.common_s(huge) for flight in beside for huge in self.flights)
        return shared_s / sum(flight.end_s - flight.start_s for flight in beside)

    async def huge_ones(self) -> None:
        """One huge request after the other, until cancelled."""
        while True:
            flight = Flight(time.perf_counter())
            self.flights.append(flight)
            new = self._words(self._huge_tokens - len(self._huge_hit))
            flight.end_s = flight.start_s + await self._ttft_s(self._huge_hit + new)

    @contextlib.asynccontextmanager
    async def beside_huge_ones(self) -> AsyncIterator[None]:
        """Huge requests are under way."""
        work = asyncio.create_task(self.huge_ones())
        try:
            await asyncio.sleep(0.05)
            yield
        finally:
            if work.done():
                work.result()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            last = self.flights[-1]
            last.end_s = min(last.end_s, time.perf_counter())


async def measure(url: str, options: Any) -> dict[str, Any]:
    """Alone and beside huge requests, in turns."""
    rounds: list[Round] = []
    found: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    async with Endpoint(url) as endpoint:
        _, raw = await endpoint.get("/v1/models", 10.0)
        (card,) = msgspec.json.decode(raw)["data"]
        huge_tokens = options.huge or card["max_model_len"] - 32
        bench = Bench(endpoint, card["id"], options.hit, huge_tokens)
        await bench.store()
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            alone = [await bench.small(number) for number in range(options.requests)]
            found["alone"].append(await bench.phases_s(options.requests))
            async with bench.beside_huge_ones():
                rounds.append(Round(alone, await bench.beside(options.requests)))
                found["beside"].append(await bench.phases_s(options.requests))
    rows = [
        {
            "small hits": name,
            "p50_ms": statistics.median(quantile_s(side, 0.5) for side in sides) * 1e3,
            "p99_ms": statistics.median(quantile_s(side, 0.99) for side in sides) * 1e3,
        }
        for name, sides in (
            ("alone", [one.alone for one in rounds]),
            ("beside", [one.beside for one in rounds]),
        )
    ]
    table(rows, list(rows[0]))
    phases_ms = {
        name: {phase: statistics.median(one[phase] for one in side) * 1e3 for phase in side[0]}
        for name, side in found.items()
    }
    ratios = [one.ratio(0.99) for one in rounds]
    ratio = statistics.median(ratios)
    print(f"p99 ratio {ratio:.2f} (target below {TARGET:g}), by round "
          + ", ".join(f"{one:.2f}" for one in ratios))  # fmt: skip
    return {
        "machine": machine(), "rows": rows, "p99_ratio": ratio, "p99_ratios": ratios,
        "p50_ratio": statistics.median(one.ratio(0.5) for one in rounds),
        "target": TARGET, "met": ratio < TARGET,
        "requests": options.requests * options.rounds, "hit_tokens": options.hit,
        "huge_requests": len(bench.flights), "huge_tokens": huge_tokens,
        "huge_ttft_s": quantile_s(bench.flights, 0.5), "huge_share": bench.huge_share(rounds),
        "phases_ms": phases_ms,
    }  # fmt: skip


@contextlib.contextmanager
def live(options: Any) -> Iterator[str]:
    """``dualpath up`` with 1 PE + 1 DE and the tiny model; gives its URL."""
    from dualpath.engine import models  # noqa: PLC0415 - needs vLLM, which --url does not
    from dualpath.serve.ports import free_ports  # noqa: PLC0415
    from engines import HOST, cluster_server  # noqa: PLC0415

    path = models.ensure(models.BundledModel.TINY)
    with tempfile.TemporaryDirectory(prefix="dualpath-bench-") as name:
        folder = Path(name)
        config = default_cluster(
            path, mode=Mode.DUALPATH, prefill=1, decode=1, store=folder / "store",
            port=free_ports(HOST, 1)[0],
            model={"path": str(path), "served_name": "tiny", "max_model_len": options.max_len},
            engine={"kv_cache": "256MiB", "max_batched_tokens": options.step, "threads": 1},
        )  # fmt: skip
        with cluster_server(config, folder) as server:
            say("starting 1 PE + 1 DE")
            say(f"ready after {server.wait_ready():.0f} s")
            yield server.url


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running cluster")
    where.add_argument("--live", action="store_true", help="start one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="small requests a round and side")
    parser.add_argument("--hit", type=int, default=128, help="stored tokens of a small request")
    parser.add_argument("--huge", type=int, default=0, help="tokens of a huge one [longest]")
    parser.add_argument("--step", type=int, default=256, help="--live: tokens of a PE's step")
    parser.add_argument("--max-len", type=int, default=4096, help="--live: longest prompt")
    options = parser.parse_args()
    with live(options) if options.live else contextlib.nullcontext(options.url) as url:
        finish(asyncio.run(measure(url, options)), options.json)


if __name__ == "__main__":
    main()
