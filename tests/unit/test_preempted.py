"""What the connector's scheduler half offers a preempted request on a DE."""

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
PROMPT = 150


class Vllm:
    """As much of vLLM's scheduler as the connector sees, for one request."""

    def __init__(self, role: Role = Role.DECODE) -> None:
        self.side = SchedulerSide(role, LAYOUT)
        params = {"rid": "r", "attempt": 0, "loaded_tokens": PROMPT, "hit_tokens": 128}
        self.request: Any = SimpleNamespace(
            request_id="r", num_prompt_tokens=PROMPT, num_tokens=PROMPT,
            all_token_ids=list(range(PROMPT)), kv_transfer_params={"dualpath": params},
        )  # fmt: skip
        self.computed = 0

    def match(self) -> int | None:
        return self.side.matched_tokens(self.request, 0)

    def admit(self) -> None:
        loaded = self.match()
        assert loaded is not None
        self.side.after_alloc(self.request, loaded)
        self.computed = loaded

    def step(self, count: int) -> Any:
        """Compute ``count`` tokens; one is sampled when all known ones are computed."""
        meta = self._build({"r": count}, None)
        self.computed += count
        if self.computed == self.request.num_tokens:
            self.request.all_token_ids.append(7)
            self.request.num_tokens += 1
        (step,) = meta.requests
        return step

    def preempt(self) -> Any:
        self.computed = 0
        return self._build({}, {"r"})

    def _build(self, scheduled: dict[str, int], preempted: set[str] | None) -> Any:
        blocks = LAYOUT.blocks_for_tokens(self.request.num_tokens)
        output: Any = SimpleNamespace(
            preempted_req_ids=preempted,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled), num_computed_tokens=[self.computed] * len(scheduled)
            ),
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: (list(range(blocks)),)
            ),
        )
        return self.side.build(output)


def decoded(tokens: int) -> Vllm:
    vllm = Vllm()
    vllm.admit()
    assert vllm.computed == PROMPT - 1
    for _ in range(tokens + 1):
        vllm.step(1)
    return vllm


def test_stored_blocks_are_offered_again_and_the_tail_is_computed() -> None:
    vllm = decoded(60)  # 210 tokens have KV: three blocks, and 18 tokens
    meta = vllm.preempt()
    assert meta.restore == {"r": 210}
    assert vllm.match() is None  # nobody knows yet: vLLM asks again
    assert vllm.match() is None
    vllm.side.restored({"r": 3})
    assert vllm.match() == 192
    assert vllm.match() == 192  # vLLM may find no room and ask again
    vllm.admit()
    step = vllm.step(19)
    assert [block.index for block in step.load] == [0, 1, 2]
    assert step.resumed == (192, 18)
    assert step.persist == ()
    following = vllm.step(1)
    assert following.resumed is None
    assert following.load == ()
    # The next block completed is handed over, once.
    persisted = [block.index for _ in range(50) for block in vllm.step(1).persist]
    assert persisted == [3]


def test_what_did_not_come_back_is_computed_and_handed_over_again() -> None:
    vllm = decoded(60)
    vllm.preempt()
    vllm.side.restored({"r": 0})
    assert vllm.match() == 0
    vllm.admit()
    step = vllm.step(211)
    assert step.load == ()
    assert step.resumed == (0, 210)
    assert [block.index for block in step.persist] == [2]  # 0 and 1 went from the DE buffer


def test_preempted_again_before_it_was_known_and_after() -> None:
    vllm = decoded(60)
    for blocks in (3, 1, 2):
        assert vllm.preempt().restore == {"r": 210 if blocks == 3 else vllm.request.num_tokens - 1}
        assert vllm.match() is None
        vllm.side.restored({"r": blocks, "stranger": 9})
        assert vllm.match() == blocks * 64
        vllm.admit()
        vllm.step(vllm.request.num_tokens - vllm.computed)
    # News that comes too late changes nothing.
    vllm.side.restored({"r": 3})
    assert vllm.match() == 0


def test_never_all_tokens() -> None:
    """vLLM must have one to compute."""
    vllm = decoded(41)
    assert vllm.request.num_tokens == 192
    vllm.preempt()
    vllm.side.restored({"r": 3})
    assert vllm.match() == 128


def test_a_pe_offers_what_its_buffer_still_holds() -> None:
    vllm = Vllm(Role.PREFILL)
    vllm.admit()
    vllm.step(10)
    assert vllm.preempt().restore == {}
    assert vllm.match() == 128
    vllm.admit()
    assert vllm.step(22).resumed == (128, 10)
