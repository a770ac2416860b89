"""A real decode engine without PE and front: its cache is too small for its batch, its loads fail.

What it says alone, to requests that are not of a session, is what is right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from test_sessions import ROOT, ScriptedFront

from dualpath import config as cluster_config
from dualpath.blocks import chain_keys
from dualpath.control.messages import (
    Allocated,
    Close,
    Closed,
    GoDecode,
    OpenDecode,
    Opened,
    SessionSpec,
    TurnDurable,
)
from dualpath.engine import models

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(500)]

BLOCK = 64
REQUESTS, PROMPT, ANSWER = 6, 300, 130


def describe(folder: Path, control_port: int) -> Path:
    data = {
        "model": {
            "path": str(models.ensure(models.BundledModel.TINY)), "served_name": "tiny",
            "max_model_len": 2048,
        },
        "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
        "front": {"control_port": control_port},
        "storage": {"path": str(folder / "store"), "fsync": False},
        "buffers": {"prefill": "16MiB", "decode": "32MiB", "landing": "4MiB", "persist": "4MiB"},
        # 35 blocks: six prompts fit, six answers do not.
        "engine": {"kv_cache": "9MiB", "max_batched_tokens": 256, "max_num_seqs": 8},
        "timeouts": {"layer": "3s"},
    }  # fmt: skip
    file = folder / "cluster.toml"
    file.write_text(cluster_config.dump(cluster_config.parse(data)))
    return file


def start(file: Path, control: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in (
        ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_HOST_IP", "127.0.0.1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("OMP_NUM_THREADS", "1"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    from vllm import LLM

    described = cluster_config.load(file)
    return LLM(
        model=described.model.path,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK,
        kv_cache_memory_bytes=int(described.engine.kv_cache),
        max_num_batched_tokens=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        enforce_eager=True,
        worker_cls="dualpath.engine.worker.DualPathWorker",
        scheduler_cls="dualpath.engine.quota.QuotaScheduler",
        kv_transfer_config={
            "kv_connector": "DualPathConnector",
            "kv_connector_module_path": "dualpath.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "config_file": str(file), "role": "decode", "rank": 0, "control": control,
                "http_url": "http://127.0.0.1:1", "run_dir": str(file.parent),
            },
        },
    )  # fmt: skip


@dataclass
class Bench:
    front: ScriptedFront
    llm: Any

    async def generate(self, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
        from vllm.inputs import TokensPrompt

        entries = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = await asyncio.to_thread(self.llm.generate, entries, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    async def alone(self, prompts: list[list[int]], **more: Any) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            answers += await self.generate([prompt], [sampling(None, **more)])
        return answers

    async def open(self, rid: str, prompt: list[int]) -> None:
        spec = SessionSpec(
            rid=rid, attempt=0, root=ROOT, keys=chain_keys(ROOT, prompt, BLOCK),
            prompt_tokens=len(prompt), hit_blocks=0,
        )  # fmt: skip
        self.front.send("de0", OpenDecode(spec=spec, read=(0, 0)))
        await self.front.expect("de0", Allocated)
        await self.front.expect("de0", Opened)

    def go(self, rid: str) -> None:
        """All of the prompt was stored, as far as the engine knows: it persists what it computes,
        out of its cache."""
        self.front.send("de0", GoDecode(rid=rid, attempt=0, good_blocks=PROMPT // BLOCK))

    async def end(self, rids: list[str]) -> dict[str, float]:
        """The engine's totals once all of them hold nothing any more."""
        # An engine in this process takes no step of itself, and so has not told of the last end.
        await self.generate([[100, 101]], [sampling(None, max_tokens=2)])
        for _ in rids:
            durable = await self.front.expect("de0", TurnDurable)
            assert isinstance(durable, TurnDurable)
            assert durable.skipped == 0
        for rid in rids:
            self.front.send("de0", Close(rid=rid, attempt=0, reason="test"))
            await self.front.expect("de0", Closed)
        return (await self.front.idle("de0")).stats.counters


@asynccontextmanager
async def decode_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async with ScriptedFront() as front:
        file = describe(folder, int(front.address.rpartition(":")[2]))
        llm = await asyncio.to_thread(start, file, front.address, monkeypatch)
        await front.joined("de0")
        try:
            yield Bench(front, llm)
        finally:
            await asyncio.to_thread(llm.llm_engine.engine_core.shutdown)


def sampling(rid: str | None, loaded_tokens: int = 0, **more: Any) -> Any:
    from vllm import SamplingParams

    ours = {"rid": rid, "attempt": 0, "loaded_tokens": loaded_tokens}
    keys = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True, **more}
    extra = {"kv_transfer_params": {"dualpath": ours}} if rid is not None else None
    return SamplingParams(**keys, extra_args=extra)


def random_prompts(count: int) -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(count)]


async def test_preempted_answers_get_their_stored_blocks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(REQUESTS)
    rids = [f"r{number}" for number in range(REQUESTS)]
    async with decode_engine(tmp_path, monkeypatch) as bench:
        expected = await bench.alone(prompts)
        for rid, prompt in zip(rids, prompts, strict=True):
            await bench.open(rid, prompt)
            bench.go(rid)
        assert await bench.generate(prompts, [sampling(rid) for rid in rids]) == expected
        counters = await bench.end(rids)
        published = bench.front.published
    told = msgspec.json.encode(counters).decode()
    preemptions = counters["preemptions"]
    assert preemptions > 0
    assert counters.get("loads_failed", 0) == 0, told
    # Only tails are computed again: less than a block each, and what was not stored yet.
    tails = BLOCK * (preemptions + counters.get("persist_dropped_blocks", 0))
    assert counters["preempted_recomputed_tokens"] <= tails, told
    assert counters["preempted_restored_tokens"] >= PROMPT // BLOCK * BLOCK * preemptions, told
    assert counters["storage_read_blocks_ok"] * BLOCK == counters["preempted_restored_tokens"], told
    # Every block of every answer is stored in the end, whatever happened in between.
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert set(chain_keys(ROOT, prompt + tokens[:-1], BLOCK)) <= published


async def test_a_failed_load_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word to use the buffer does not come: the prompt is computed again. Seeded answers draw
    as if nothing had happened."""
    prompts = random_prompts(2)
    seeded = {"seed": 11, "temperature": 1.0, "max_tokens": 20}
    async with decode_engine(tmp_path, monkeypatch) as bench:
        for number, more in enumerate((seeded, {"max_tokens": 20})):
            prompt, rid = prompts[number], f"r{number}"
            expected = await bench.alone([prompt], **more)
            await bench.open(rid, prompt)
            assert await bench.generate([prompt], [sampling(rid, PROMPT, **more)]) == expected
            bench.go(rid)
            counters = await bench.end([rid])
            assert counters["loads_failed"] == number + 1
