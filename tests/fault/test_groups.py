"""Two PEs and two DEs, two engines a node: groups, split, a stopped engine, profile and quota.

Two more servers to compare with would not fit a small machine, so right means consistent here:
the same prompts give the same tokens whichever engines and ways they took (other tests compare
with a plain vLLM).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_kit import (
    Api,
    Running,
    cluster_description,
    free_port,
    open_session,
    start_cluster,
    until_ready,
)

from dualpath.config import ClusterConfig
from dualpath.engine import models
from dualpath.scheduler.decision_log import replay
from dualpath.scheduler.profile import decode_profile

pytestmark = [pytest.mark.fault, pytest.mark.e2e, pytest.mark.timeout(1500)]

BLOCK = 64
AGENTS, TURNS = 8, 3
# Layers, tokens, K and V, KV heads, head size, float32.
FULL_BLOCK_BYTES = 4 * BLOCK * 2 * 2 * 64 * 4
SNIC_BYTES_S = 20e6
ENGINES = {"pe0", "pe1", "de0", "de1"}
START_S = 700.0


def description(folder: Path, **scheduler: Any) -> ClusterConfig:
    snic = {"read": f"{SNIC_BYTES_S:.0f}B/s"}
    return cluster_description(
        str(models.ensure(models.BundledModel.TINY)),
        folder / "store",
        free_port(),
        nodes=[
            {"name": "p", "role": "prefill", "engines": 2, "snic": snic},
            {"name": "d", "role": "decode", "engines": 2, "snic": snic},
        ],
        scheduler=scheduler,
        timeouts={"transfer": "5s", "layer": "5s"},
    )


@dataclass
class Bench:
    """The cluster, and what its agents' answers must be."""

    folder: Path
    config: ClusterConfig
    cluster: Running
    right: dict[int, list[list[int]]] = field(default_factory=dict)
    served: int = 0
    profile: Path | None = None


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("groups")
    config = description(folder, decision_log=str(folder / "decisions.jsonl"))
    cluster = start_cluster(config, folder)
    bench = Bench(folder, config, cluster)
    try:
        until_ready(cluster, "/ready", START_S)
        yield bench
    finally:
        bench.cluster.stop()


@pytest.fixture
async def api(bench: Bench) -> AsyncIterator[Api]:
    """Of whichever cluster runs; afterwards every ledger must be back to zero."""
    async with open_session(300) as session:
        api = Api(bench.cluster.url, session)
        await all_usable(api)
        yield api
        await Api(bench.cluster.url, session).idle(60.0)


async def all_usable(api: Api) -> None:
    async with asyncio.timeout(START_S):
        while True:
            engines = (await api.state())["engines"]
            if {engine["name"] for engine in engines if engine["usable"]} == ENGINES:
                return
            await asyncio.sleep(0.2)


async def agents(api: Api, salt: str) -> dict[int, list[list[int]]]:
    """Eight agents at once, three turns each. The salt keeps a run from hitting another's blocks;
    within a run, every turn must hit all whole blocks of the turns before."""

    async def one(number: int) -> list[list[int]]:
        source = random.Random(f"agent {number}")
        prompt = [source.randrange(100, 40_000) for _ in range(500 + 60 * number)]
        before = 0
        said: list[list[int]] = []
        for _ in range(TURNS):
            answer = await api.complete(prompt, 12, cache_salt=salt)
            tokens = answer["choices"][0]["token_ids"]
            cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            assert cached == before // BLOCK * BLOCK
            # KV exists for every token but the last, which was never fed back.
            before = len(prompt) + len(tokens) - 1
            said.append(tokens)
            prompt = prompt + tokens + [source.randrange(100, 40_000) for _ in range(50)]
        return said

    return dict(enumerate(await asyncio.gather(*map(one, range(AGENTS)))))


async def policy(api: Api, name: str) -> None:
    await api.idle()
    await api.post("/admin/mode", {"mode": "dualpath", "policy": name})


async def records(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await api.get("/debug/requests"))["requests"]
    return found[-AGENTS * TURNS :]


# In this order: each test goes on with what the ones before have shown.


async def test_all_engines_of_both_groups_work(bench: Bench, api: Api) -> None:
    await policy(api, "pe_only")
    bench.right = await agents(api, "pe_only")
    state = await api.idle()
    assert state["path"]["de"] == 0
    used = {record[side] for record in await records(api) for side in ("prefill", "decode")}
    assert used == ENGINES
    for engine in state["engines"]:
        seconds = engine["stats"]["counters"].get("attention_seconds")
        assert (seconds > 0) if engine["role"] == "prefill" else seconds is None
    for samples in (await api.get("/debug/attention"))["engines"].values():
        assert samples["total"] == len(samples["samples"]) > 0
        assert all(0 < bsz <= 256 and s > 0 for _, bsz, s in samples["samples"])


@pytest.mark.parametrize("name", ["paper", "round_robin", "split"])
async def test_the_same_tokens_whichever_way(bench: Bench, api: Api, name: str) -> None:
    await policy(api, name)
    before = (await api.state())["path"]
    assert await agents(api, name) == bench.right
    now = (await api.idle())["path"]
    moved = {side: now[side] - before[side] for side in now}
    mine = await records(api)
    hit_blocks = sum(record["hit_tokens"] for record in mine) // BLOCK
    assert moved["pe"] + moved["de"] == hit_blocks * FULL_BLOCK_BYTES
    assert moved["pe"] > 0
    assert moved["de"] > 0
    if name == "split":
        both = [record for record in mine if record["path"] == "split"]
        assert both
        assert all(record["pe_blocks"] and record["de_blocks"] for record in both)
        assert (
            moved["split"]
            == sum(record["pe_blocks"] + record["de_blocks"] for record in both) * FULL_BLOCK_BYTES
        )


async def test_a_stopped_engine_is_drained_and_its_requests_tried_again(
    bench: Bench, api: Api
) -> None:
    await policy(api, "paper")
    running = asyncio.create_task(agents(api, "stopped"))
    pid = await stop_in_the_middle(api, running)
    try:
        assert await running == bench.right
        engines = {engine["name"]: engine for engine in (await api.state())["engines"]}
        assert engines["pe1"]["usable"] is False
    finally:
        os.kill(pid, signal.SIGCONT)
    tries = [record["attempt"] for record in await records(api)]
    assert max(tries) == 1
    await all_usable(api)
    await api.idle(60.0)
    assert await agents(api, "continued") == bench.right
    assert "pe1" in {record["prefill"] for record in await records(api)}


async def stop_in_the_middle(api: Api, running: asyncio.Task[Any]) -> int:
    """Stop pe1 with sessions on it; its pid."""
    async with asyncio.timeout(60):
        while True:
            assert not running.done()
            engine = await engine_state(api, "pe1")
            pid = int(engine["pid"])
            if engine["open_sessions"]:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.5)
                if (await engine_state(api, "pe1"))["open_sessions"]:
                    return pid
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.02)


async def engine_state(api: Api, name: str) -> dict[str, Any]:
    engines: list[dict[str, Any]] = (await api.state())["engines"]
    return next(engine for engine in engines if engine["name"] == name)


async def test_the_profile_measures_what_is_configured(bench: Bench, api: Api) -> None:
    await policy(api, "pe_only")
    out = bench.folder / "profile.json"
    argv = [
        str(Path(sys.executable).with_name("dualpath")), "profile", "--json",
        "--config", str(bench.folder / "cluster.toml"), "--url", bench.cluster.url,
        "--out", str(out),
    ]  # fmt: skip
    done = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    profile = decode_profile(out.read_bytes())
    assert (line["alpha_tokens"], line["beta_tokens"]) == (
        profile.alpha_tokens, profile.beta_tokens,
    )  # fmt: skip
    assert line["snic_lower_bounds"] == []
    assert set(profile.snic_read_bytes_s) == {"p", "d"}
    for rate in profile.snic_read_bytes_s.values():
        assert 0.7 * SNIC_BYTES_S < rate < 1.1 * SNIC_BYTES_S
    assert profile.token_bytes * BLOCK == FULL_BLOCK_BYTES
    assert 0 < profile.hit_ratio < 1
    assert profile.attention.mean_relative_error <= 0.15
    assert (await api.state())["policy"] == "pe_only"  # given back
    bench.profile = out


async def test_the_decision_log_replays_and_the_quota_changes_no_token(bench: Bench) -> None:
    """The live run's log, on a fresh scheduler; then the cluster again, with the profile: steps
    are cut by attention time, and the tokens stay."""
    assert bench.profile is not None, "the profile was not measured"
    bench.cluster.stop()
    decisions = replay((bench.folder / "decisions.jsonl").read_text().splitlines())
    assigned = [made for decision in decisions for made in decision.assigned]
    assert len({made.rid for made in assigned}) == len(assigned) >= 6 * AGENTS * TURNS
    assert {made.prefill for made in assigned} | {made.decode for made in assigned} == ENGINES

    model = decode_profile(bench.profile.read_bytes()).attention
    quota_s = model.batch_s([(0, 256)]) / 2
    folder = bench.folder / "again"
    folder.mkdir()
    bench.config = description(
        folder, profile=str(bench.profile), compute_quota=f"{quota_s * 1e3:.6f}ms"
    )
    bench.cluster = start_cluster(bench.config, folder)
    until_ready(bench.cluster, "/ready", START_S)
    resolved = msgspec.toml.decode((folder / "run" / "cluster.toml").read_text())
    assert resolved["scheduler"]["profile"] == str(bench.profile)
    async with open_session(300) as session:
        api = Api(bench.cluster.url, session)
        await all_usable(api)
        assert await agents(api, "quota") == bench.right
        await api.idle()
        state = (await api.get("/debug/attention"))["engines"]
        steps = [(c, bsz) for pe in state.values() for c, bsz, _ in pe["samples"]]
        assert steps
        slack = 1 + 1e-6  # the quota went through a text
        assert all(bsz == 1 or model.batch_s([(c, bsz)]) <= quota_s * slack for c, bsz in steps)
        assert max(bsz for _, bsz in steps) < 256
