"""Which steps of a PE are attention samples: prompt tokens of one request and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from dualpath.blocks import BlockLayout
from dualpath.config import Role
from dualpath.engine.scheduler_side import SchedulerSide

pytestmark = pytest.mark.unit

LAYOUT = BlockLayout(num_layers=2, block_tokens=64, engine_block_tokens=64, token_layer_bytes=16)


def request(name: str, prompt: int, hit: int = 0) -> Any:
    params = {"dualpath": {"rid": name, "attempt": 0, "hit_tokens": hit}}
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_tokens=prompt, all_token_ids=[1] * prompt,
        kv_transfer_params=params,
    )  # fmt: skip


def output(
    new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]] | None = None
) -> Any:
    """A step: per request where it starts and how many tokens it computes."""
    cached = cached or {}
    every = new | cached
    return SimpleNamespace(
        preempted_req_ids=None,
        total_num_scheduled_tokens=sum(count for _, count in every.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start)
            for name, (start, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens={name: count for name, (_, count) in every.items()},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: ([0, 1, 2, 3, 4],)),
    )


@pytest.mark.parametrize("role", list(Role))
def test_a_step_of_one_prompt_is_a_sample_on_a_pe(role: Role) -> None:
    side = SchedulerSide(role, LAYOUT)
    side.after_alloc(request("a", 300, 128), 128)
    expected = (128, 100) if role is Role.PREFILL else None
    assert side.build(output({"a": (128, 100)})).single == expected
    # Its next chunk; then a token after the prompt, which is decoding.
    expected = (228, 72) if role is Role.PREFILL else None
    assert side.build(output({}, {"a": (228, 72)})).single == expected
    assert side.build(output({}, {"a": (300, 1)})).single is None


def test_a_step_of_more_than_one_request_is_none() -> None:
    side = SchedulerSide(Role.PREFILL, LAYOUT)
    for name in ("a", "b"):
        side.after_alloc(request(name, 200), 0)
    assert side.build(output({"a": (0, 100), "b": (0, 100)})).single is None
    # A request that is not ours computes in the same step.
    assert side.build(output({"stranger": (0, 9)}, {"a": (100, 100)})).single is None
    assert side.build(output({"stranger": (0, 9)})).single is None
    assert side.build(output({}, {"b": (100, 100)})).single == (100, 100)
    assert side.build(output({})).single is None
