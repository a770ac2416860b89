"""The model, the blocks it makes, and whether buffers and HBM are made for them."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from dualpath.blocks import BlockLayout
from dualpath.config import ClusterConfig, NodeConfig, Role
from dualpath.doctor.finding import Finding, fail, ok, warn
from dualpath.doctor.machine import weight_bytes
from dualpath.model import ModelFacts, UnsupportedModel

_ENGINES = {Role.PREFILL: "prefill engine", Role.DECODE: "decode engine"}


def check_model(config: ClusterConfig) -> tuple[Finding, BlockLayout | None]:
    """Whether the model can be served, and the layout of its blocks."""
    path = Path(config.model.path)
    if not path.is_dir():
        return warn(
            "model", f"{path} is not a folder here: its blocks cannot be sized",
            "put the model there, or let vLLM download it",
        ), None  # fmt: skip
    try:
        facts = ModelFacts.from_config_json(path, kv_dtype=config.model.dtype)
    except UnsupportedModel as error:
        return fail("model", str(error), "choose a supported model"), None
    layout = BlockLayout(
        num_layers=facts.num_layers,
        block_tokens=config.engine.block_tokens,
        engine_block_tokens=config.engine.engine_block_tokens,
        token_layer_bytes=facts.token_layer_bytes,
    )
    return ok(
        "model", f"{facts.architecture}, {facts.token_bytes:,} bytes of KV a token, "
        f"{layout.full_block_bytes:,} a block",
    ), layout  # fmt: skip


def check_buffers(
    config: ClusterConfig, layout: BlockLayout, nodes: Sequence[NodeConfig]
) -> Iterator[Finding]:
    """Whether the longest prompt fits: it needs the whole of itself in the DE's buffer."""
    need = layout.blocks_for_tokens(config.model.max_model_len) * layout.slot_bytes
    for role, field, size in (
        (Role.PREFILL, "buffers.prefill", config.buffers.prefill),
        (Role.DECODE, "buffers.decode", config.buffers.decode),
    ):
        if not any(node.role is role for node in nodes):
            continue
        tokens = size // layout.slot_bytes * layout.block_tokens
        if size < need:
            yield fail(
                field, f"{size:,} bytes hold {tokens:,} tokens; longer prompts are refused",
                f"at least {need:,} bytes for model.max_model_len = {config.model.max_model_len}",
            )  # fmt: skip
        else:
            yield ok(field, f"{size:,} bytes hold {tokens:,} tokens")


def check_cache(
    config: ClusterConfig, layout: BlockLayout, nodes: Sequence[NodeConfig]
) -> Iterator[Finding]:
    """Whether the longest prompt fits the KV cache of each kind of engine, and how much more a PE
    holds because its layers take turns."""
    layers, size = layout.num_layers, config.engine.kv_cache
    for role in Role:
        if not any(node.role is role for node in nodes):
            continue
        held = config.layer_regions(role, layers)
        tokens = size // (held * layout.layer_block_bytes) * layout.block_tokens
        turns = (
            f": {layers} layers take turns in {held}, {layers / held:g} times as many as with a "
            "place for each" if held < layers else ""
        )  # fmt: skip
        text = f"{size:,} bytes hold {tokens:,} tokens on a {_ENGINES[role]}{turns}"
        if tokens < config.model.max_model_len:
            need = layout.blocks_for_tokens(config.model.max_model_len) * held
            yield fail(
                "engine.kv_cache", f"{text}; vLLM will not start with so few",
                f"at least {need * layout.layer_block_bytes:,} bytes for model.max_model_len = "
                f"{config.model.max_model_len}",
            )  # fmt: skip
        else:
            yield ok("engine.kv_cache", text)


def check_hbm(config: ClusterConfig) -> Iterator[Finding]:
    """Room on every GPU for weights and KV cache, asked of nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield warn("hbm", "there is a GPU but no nvidia-smi to ask", "install the GPU's driver")
        return
    query = [program, "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield warn("hbm", f"nvidia-smi does not answer: {error}", "look after the GPU's driver")
        return
    yield from judge_hbm(config, done.stdout, weight_bytes(Path(config.model.path)))


def judge_hbm(config: ClusterConfig, answer: str, weights: int) -> Iterator[Finding]:
    """Judge nvidia-smi's lines ``index, total MiB, free MiB``."""
    need = weights + config.engine.kv_cache
    for index, total_mib, free_mib in csv.reader(answer.splitlines(), skipinitialspace=True):
        total, free = int(total_mib) << 20, int(free_mib) << 20
        text = (
            f"GPU {index}: weights {weights:,} + engine.kv_cache {config.engine.kv_cache:,} bytes; "
            f"{free:,} of {total:,} free"
        )
        if need > total:
            yield fail("hbm", text, "make engine.kv_cache smaller")
        elif need > free:
            yield warn("hbm", text, "free the GPU, unless an engine of this cluster is on it")
        else:
            yield ok("hbm", text)
