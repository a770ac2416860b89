"""Layers that take turns in a PE's memory, on and off: what fits, what moves twice, what is hidden.

Starts a cluster of one PE and one DE twice, with ``engine.layer_aliasing`` on and off, and sends
the same prompts: long ones that hit, with a tail that takes several steps. From the engine's
timeline and counters:

* blocks that fit the same memory, and their ratio (n_layer / R is what must come out);
* per layer: computing, loading, and the part of loading that computing did not hide (the model
  stood still);
* bytes moved twice: put back for a further step of the same prompt.

On a CPU the copies and the model share the cores, so what is exposed here is an upper bound.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp

from common import arguments, machine, say
from dualpath.cli.defaults import default_cluster
from dualpath.config import Mode
from dualpath.engine import models
from dualpath.engine.program import engine_argv
from dualpath.serve.local import local_cluster
from dualpath.spans import events, merge

HIT_TOKENS = 1536
TAIL_TOKENS = 320
STEP_TOKENS = 160
PROMPTS = 4
BLOCK_TOKENS = 64


async def complete(session: aiohttp.ClientSession, url: str, name: str, prompt: list[int]) -> None:
    """One answer of one token."""
    body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"error: {response.status}: {await response.text()}")


async def pe_report(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The PE's latest figures, once they can hold everything sent so far."""
    await asyncio.sleep(0.5)
    async with session.get(url + "/debug/state") as response:
        state = await response.json()
    (stats,) = [engine["stats"] for engine in state["engines"] if engine["role"] == "prefill"]
    assert isinstance(stats, dict)
    return stats


async def run(model: models.BundledModel, folder: Path, aliasing: bool) -> dict[str, Any]:
    """One cluster's figures; its timeline is ``folder/all.trace.json`` afterwards."""
    path = models.ensure(model)
    config = default_cluster(
        path, mode=Mode.DUALPATH, prefill=1, decode=1, store=folder / "store", port=0,
        engine={
            "kv_cache": "192MiB", "max_batched_tokens": STEP_TOKENS, "layer_aliasing": aliasing,
        },
        log={"timeline": str(folder / "timeline")},
        scheduler={"policy": "alternating"},
    )  # fmt: skip
    source = random.Random(5)
    say(f"layer_aliasing = {str(aliasing).lower()}: starting")
    timeout = aiohttp.ClientTimeout(600)
    async with (
        local_cluster(config, folder / "run", engine_argv) as cluster,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        name = config.model.name
        prompts = [
            [source.randrange(100, 40_000) for _ in range(HIT_TOKENS)] for _ in range(PROMPTS)
        ]
        for prompt in prompts:
            await complete(session, cluster.url, name, prompt)
        before = await pe_report(session, cluster.url)
        say("measuring")
        for prompt in prompts:
            tail = [source.randrange(100, 40_000) for _ in range(TAIL_TOKENS)]
            await complete(session, cluster.url, name, prompt + tail)
        after = await pe_report(session, cluster.url)
    merge(folder / "timeline", folder / "all.trace.json")
    figures = {
        key: after["counters"].get(key, 0) - before["counters"].get(key, 0)
        for key in ("layer_wait_us", "moved_twice_bytes", "host_to_device_bytes",
                    "device_to_host_bytes", "d2_bytes")
    }  # fmt: skip
    return {
        "blocks": after["hbm_tokens_total"] // BLOCK_TOKENS,
        "kv_cache_bytes": int(config.engine.kv_cache),
        **figures,
        "layers": layers(folder / "all.trace.json"),
    }


def pe_spans(file: Path) -> list[tuple[str, str, float, float]]:
    """``(track, name, start s, seconds)`` of everything the PE did."""
    pids: set[int] = set()
    tracks: dict[tuple[int, int], str] = {}
    found = []
    for event in events(file):
        if event["name"] == "process_name" and event["args"]["name"] == "pe0":
            pids.add(event["pid"])
        elif event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["pid"] in pids:
            track = tracks[event["pid"], event["tid"]]
            found.append((track, event["name"], event["ts"] / 1e6, event["dur"] / 1e6))
    return found


def layers(file: Path) -> list[dict[str, float]]:
    """Per layer, over steps that load: medians of computing and loading, mean exposed time."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for track, name, _, taken_s in pe_spans(file):
        kind = track.split()[0]
        if kind in ("computing", "waiting", "load"):
            times[kind][int(name.split()[-1])].append(taken_s)
    return [
        {
            "layer": layer,
            "computing_ms": 1e3 * statistics.median(times["computing"][layer]),
            "loading_ms": 1e3 * statistics.median(times["load"][layer]),
            "exposed_ms": 1e3 * sum(times["waiting"].get(layer, [])) / len(times["load"][layer]),
        }
        for layer in sorted(times["load"])
    ]


def show(name: str, figures: dict[str, Any]) -> None:
    """One run as text."""
    rows = figures["layers"]
    load = sum(row["loading_ms"] for row in rows)
    exposed = sum(row["exposed_ms"] for row in rows)
    first = rows[0]["exposed_ms"]
    print(f"{name}:")
    print(f"  blocks in {figures['kv_cache_bytes'] >> 20} MiB      {figures['blocks']}")
    print(f"  moved twice              {figures['moved_twice_bytes'] / 1e6:.1f} MB")
    print(f"  into HBM, out of HBM     {figures['host_to_device_bytes'] / 1e6:.1f} MB, "
          f"{figures['device_to_host_bytes'] / 1e6:.1f} MB")  # fmt: skip
    print(f"  a step's loads           {load:.1f} ms, of which exposed {exposed:.1f} ms "
          f"({first:.1f} ms before layer 0, which nothing can hide)")  # fmt: skip
    print("  layer  computing  loading  exposed   (ms)")
    for row in rows:
        print(
            f"  {row['layer']:5d}  {row['computing_ms']:9.2f}  {row['loading_ms']:7.2f}  "
            f"{row['exposed_ms']:7.2f}"
        )


def main() -> None:
    """Both runs, then the comparison."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="smollm2")
    parser.add_argument("--keep", type=Path, help="folder for timelines and logs; kept")
    parser.add_argument("--only", choices=["on", "off"], help="one of the two runs")
    options = parser.parse_args()
    model = models.bundled(options.model)
    assert model is not None
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dualpath-layerwise-") as scratch:
        folder = options.keep or Path(scratch)
        for name, aliasing in (("on", True), ("off", False)):
            if options.only in (None, name):
                results[name] = asyncio.run(run(model, folder / name, aliasing))
                show(f"layer_aliasing {name}", results[name])
    if len(results) == 2:
        results["blocks_ratio"] = results["on"]["blocks"] / results["off"]["blocks"]
        print(f"blocks, on / off: {results['blocks_ratio']:.2f}")
    if options.json:
        print(json.dumps({"model": options.model, **results, "machine": machine()}))


if __name__ == "__main__":
    main()
