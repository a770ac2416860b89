"""What a PE's scheduler lets vLLM put into a step, step after step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dualpath.blocks import BlockLayout
from dualpath.config import Role
from dualpath.engine.quota import _Quota
from dualpath.engine.scheduler_side import SchedulerSide

pytestmark = pytest.mark.unit

STEP = 256


class Steps:
    """In the place of vLLM's scheduler: keeps what it is told of each step."""

    max_num_scheduled_tokens: int
    scheduler_config: Any

    def schedule(self) -> tuple[int, int]:
        return (
            self.max_num_scheduled_tokens,
            self.scheduler_config.long_prefill_token_threshold,
        )


class Limited(_Quota, Steps):
    """The mixin around it, of an engine without a profile."""

    def __init__(self, role: Role, most_of_one: int = 0) -> None:
        side = SchedulerSide(role, BlockLayout(2, 64, 64, 8))
        self.connector = SimpleNamespace(
            get_num_new_matched_tokens=lambda request, computed: (
                side.matched_tokens(request, computed),
                False,
            )
        )
        self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=most_of_one)
        self.running, self.waiting = [], []
        self.max_num_running_reqs = 8
        self.max_num_scheduled_tokens = self._most_tokens = STEP
        self._most_of_one = most_of_one
        self._is_prefill = role is Role.PREFILL
        self._profile = None


def prompt(tokens: int, computed: int = 0, *, hit: int = 0, ours: bool = True) -> Any:
    params = {"rid": "r", "attempt": 0, "hit_tokens": hit, "quota": True}
    return SimpleNamespace(
        request_id="x", num_tokens=tokens, num_computed_tokens=computed,
        kv_transfer_params={"dualpath": params} if ours else None,
    )  # fmt: skip


def test_a_long_prompt_is_held_back_only_while_short_ones_wait() -> None:
    engine = Limited(Role.PREFILL)
    long, short = prompt(4000, 512), prompt(138, hit=128)
    engine.running = [long]
    assert engine.schedule() == (STEP, 0)
    engine.waiting = [short]
    assert engine.schedule() == (STEP, STEP // 2)
    engine.waiting = []
    assert engine.schedule() == (STEP, 0)


def test_what_is_stored_of_a_prompt_does_not_make_it_long() -> None:
    engine = Limited(Role.PREFILL)
    engine.running, engine.waiting = [prompt(4000)], [prompt(4000)]
    assert engine.schedule() == (STEP, 0)
    engine.waiting = [prompt(4000, hit=3968)]
    assert engine.schedule() == (STEP, STEP // 2)


@pytest.mark.parametrize(("own", "then"), [(40, 40), (200, STEP // 2)])
def test_a_limit_of_vllm_stays(own: int, then: int) -> None:
    """The lower of the two holds; alone, and beside a request that is not ours, vLLM's."""
    engine = Limited(Role.PREFILL, own)
    engine.running, engine.waiting = [prompt(4000, 512)], [prompt(70)]
    assert engine.schedule() == (STEP, then)
    engine.waiting.append(prompt(70, ours=False))
    assert engine.schedule() == (STEP, own)
    engine.waiting = []
    assert engine.schedule() == (STEP, own)


def test_a_de_is_left_alone() -> None:
    engine = Limited(Role.DECODE)
    engine.running, engine.waiting = [prompt(4000, 512)], [prompt(70)]
    assert engine.schedule() == (STEP, 0)
