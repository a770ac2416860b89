"""A cluster whose layers come and go late and leave poison behind, and a plain vLLM beside it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import (
    Api,
    Servers,
    cluster_description,
    free_port,
    start,
    start_cluster,
    until_ready,
)

from dualpath.engine.launch import installed_device, plain_command


@contextlib.contextmanager
def slow_cluster(
    folder: Path,
    model: Path,
    engine: dict[str, Any],
    *,
    plain_engine: dict[str, Any] | None = None,
    args: tuple[str, ...] = (),
    worker: str = "SlowWorker",
    **changes: Any,
) -> Iterator[Servers]:
    """Both started together, because each takes a minute.

    Args:
        engine: the cluster's engine table; ``plain_engine`` what is different for the plain one.
        args: further arguments of the cluster's vLLM.
        worker: which of ``slow_layers``.
        changes: other tables of the cluster file.
    """
    engine = {"layer_aliasing": True, "env": {"VLLM_SERVER_DEV_MODE": "1"}, **engine}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.getenv("PYTHONPATH", ""))))
    slow = {
        **engine,
        "extra_args": [
            *engine.get("extra_args", ()),
            *args,
            "--worker-cls",
            f"slow_layers.{worker}",
        ],
        "env": {**engine["env"], "PYTHONPATH": path},
    }
    store = folder / "store"
    config = cluster_description(str(model), store, free_port(), engine=slow, **changes)
    plain_config = cluster_description(
        str(model), store, free_port(), engine={**engine, **(plain_engine or {})}, **changes
    )
    port = free_port()
    command = plain_command(
        plain_config, python=sys.executable, device=installed_device(), host="127.0.0.1",
        http_port=port,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    plain = start(list(command.argv), folder / "plain.log", url, dict(command.env))
    cluster = start_cluster(config, folder)
    try:
        until_ready(plain, "/health")
        until_ready(cluster, "/ready")
        yield Servers(cluster, plain, store)
    finally:
        cluster.stop()
        plain.stop()


async def policy(front: Api, name: str) -> None:
    """Let one policy choose the paths from now on."""
    await front.idle()
    await front.post("/admin/mode", {"mode": "dualpath", "policy": name})


async def pe_stats(front: Api) -> dict[str, Any]:
    """The latest report of the only PE."""
    engines = (await front.state())["engines"]
    (stats,) = [engine["stats"] for engine in engines if engine["role"] == "prefill"]
    assert isinstance(stats, dict)
    return stats


async def counters(front: Api) -> dict[str, float]:
    """Its totals."""
    found: dict[str, float] = (await pe_stats(front))["counters"]
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    """Two answers with log-probabilities have the same tokens and the same numbers."""
    a, b = ours["choices"][0], theirs["choices"][0]
    assert a["token_ids"] == b["token_ids"]
    assert a["logprobs"]["token_logprobs"] == pytest.approx(
        b["logprobs"]["token_logprobs"], abs=tolerance
    )


async def same_numbers(
    front: Api, plain: Api, prompt: list[int], tokens: int, tolerance: float = 1e-3
) -> int:
    """A prompt's answer is the plain vLLM's; the hit tokens."""
    answer = await front.complete(prompt, tokens, logprobs=1)
    assert_same(answer, await plain.complete(prompt, tokens, logprobs=1), tolerance)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens", 0))
