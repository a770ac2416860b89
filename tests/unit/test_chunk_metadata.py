"""What each step of a chunked prompt loads and pushes, with layers that take turns and without."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from test_single_steps import LAYOUT, output, request

from dualpath.config import Role
from dualpath.engine.metadata import StepRequest
from dualpath.engine.scheduler_side import SchedulerSide

pytestmark = pytest.mark.unit

PROMPT, HIT = 300, 128


def side_of(*, aliased: bool) -> SchedulerSide:
    side = SchedulerSide(Role.PREFILL, LAYOUT, aliased=aliased)
    side.after_alloc(request("a", PROMPT, HIT), HIT)
    return side


def step(side: SchedulerSide, start: int, count: int, *, new: bool = False) -> StepRequest:
    share: dict[str, tuple[int, int]] = {"a": (start, count)}
    (found,) = side.build(output(share) if new else output({}, share)).requests
    return found


def loads(found: StepRequest) -> list[int]:
    return [block.index for block in found.load]


def pushes(found: StepRequest) -> list[tuple[int, bool]]:
    return [(block.index, block.complete) for block in found.push]


def test_all_that_was_computed_comes_back_for_each_chunk() -> None:
    side = side_of(aliased=True)
    first = step(side, 128, 70, new=True)
    assert (loads(first), first.load_again, first.hit_blocks) == ([0, 1], False, 2)
    assert pushes(first) == [(2, True), (3, False)]
    second = step(side, 198, 58)
    assert (loads(second), second.load_again, second.hit_blocks) == ([0, 1, 2, 3], True, None)
    assert pushes(second) == [(3, True)]
    third = step(side, 256, 44)
    assert (loads(third), third.load_again) == ([0, 1, 2, 3], True)
    assert pushes(third) == [(4, True)], "the prompt's last block is complete although not full"


def test_with_all_layers_in_memory_only_the_hit_is_loaded_and_only_once() -> None:
    side = side_of(aliased=False)
    first = step(side, 128, 70, new=True)
    assert (loads(first), first.load_again, first.hit_blocks) == ([0, 1], False, 2)
    assert pushes(first) == [(2, True)]
    second = step(side, 198, 102)
    assert (loads(second), second.hit_blocks) == ([], None)
    assert pushes(second) == [(3, True), (4, True)]


@pytest.mark.parametrize("aliased", [True, False])
def test_after_a_failed_load_the_hit_is_not_believed_again(aliased: bool) -> None:
    """vLLM begins at 0; a later chunk that starts exactly where the hit ended is no new beginning
    with it."""
    side = side_of(aliased=aliased)
    step(side, 128, 70, new=True)
    again = step(side, 0, 128)
    assert (loads(again), again.hit_blocks) == ([], 0)
    assert pushes(again) == [(0, True), (1, True)]
    later = step(side, 128, 72)
    assert later.hit_blocks is None
    assert loads(later) == ([0, 1] if aliased else [])


def test_a_preempted_prompt_loads_its_hit_again() -> None:
    side = side_of(aliased=True)
    step(side, 128, 70, new=True)
    gone: Any = output({})
    gone.preempted_req_ids = {"a"}
    side.build(gone)
    side.after_alloc(request("a", PROMPT, HIT), HIT)
    resumed = step(side, 128, 90)
    assert (loads(resumed), resumed.load_again, resumed.hit_blocks) == ([0, 1], True, 2)
    assert resumed.resumed == (128, 70)
