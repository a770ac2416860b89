"""The half of the connector inside vLLM's scheduler: how much is a hit, and what each step owes.

It does no I/O and waits for nothing. The front submits a request only when its KV is in host
memory already, so a match is answered at once and synchronously, which is what lets vLLM compute
layer by layer while the KV arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from dualpath.blocks import BlockLayout
from dualpath.config import Role
from dualpath.engine.metadata import FinishedRequest, StepMetadata, StepRequest
from dualpath.transfer.decode import PersistBlock
from dualpath.transfer.exports import PushBlock
from dualpath.transfer.loads import LoadBlock

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class RequestParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_transfer_params["dualpath"]`` of a request: set by the front, and by nobody else.

    Attributes:
        rid, attempt: the session.
        hit_tokens: on a PE: verified tokens that can be loaded (whole blocks).
        loaded_tokens: on a DE: tokens whose KV the DE buffer holds.
        quota: on a PE: the request's steps are held to the compute quota.
    """

    rid: str
    attempt: int
    hit_tokens: int = 0
    loaded_tokens: int = 0
    quota: bool = False


@dataclass(slots=True)
class _Tracked:
    request: Request
    params: RequestParams
    load_tokens: int = 0
    load_due: bool = False
    loaded_once: bool = False
    holds_blocks: bool = False
    first_persist: int = 0
    next_persist: int = 0
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    preempted: bool = False
    restored: int | None = None
    """Once preempted: leading blocks that are in host memory again, None while not known."""


class SchedulerSide:
    """See ``KVConnectorBase_V1``'s scheduler-side methods, which delegate here.

    Args:
        aliased: layers take turns in the engine's memory, so that every step brings back what
            the steps before it left behind.
    """

    def __init__(self, role: Role, layout: BlockLayout, *, aliased: bool = False) -> None:
        self._role = role
        self._layout = layout
        self._aliased = aliased
        self._tracked: dict[str, _Tracked] = {}
        self._finished: list[FinishedRequest] = []

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond ``num_computed``; None while that is not known (vLLM
        goes on with other requests and asks again)."""
        params = request_params(request)
        if params is None or num_computed:
            return 0
        tracked = self._tracked.get(request.request_id)
        if self._role is Role.PREFILL:
            whole = min(params.hit_tokens, int(request.num_tokens) - 1) // self._layout.block_tokens
            return whole * self._layout.block_tokens
        if tracked is not None and tracked.preempted:
            # The buffer was given back, and vLLM's blocks are others now: what comes back comes
            # out of the store (see ``restored``).
            if tracked.restored is None:
                return None
            known = (int(request.num_tokens) - 1) // self._layout.block_tokens
            return min(tracked.restored, known) * self._layout.block_tokens
        if tracked is not None and tracked.loaded_once:
            return 0
        return min(params.loaded_tokens, int(request.num_tokens) - 1)

    def after_alloc(self, request: Request, external_tokens: int) -> None:
        """Blocks are allocated: remember what the next step must load."""
        params = request_params(request)
        if params is None:
            return
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            first = self._layout.full_blocks_in(request.num_prompt_tokens)
            if self._role is Role.DECODE:
                # Blocks below are in the DE buffer already and are persisted from there. With a
                # first token from the PE the prompt vLLM sees is one longer than that.
                first = self._layout.full_blocks_in(params.loaded_tokens)
            tracked = _Tracked(request, params, first_persist=first, next_persist=first)
            self._tracked[request.request_id] = tracked
        tracked.holds_blocks = True
        tracked.load_tokens = external_tokens
        tracked.load_due = external_tokens > 0

    def restored(self, blocks: Mapping[str, int]) -> None:
        """The worker has read leading blocks of preempted requests back (or could not: 0)."""
        for request_id, count in blocks.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.preempted:
                tracked.restored = count

    def _preempted(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Note preemptions; the tokens that had KV, of each request that may get them back."""
        lost: dict[str, int] = {}
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.preempted = True
            tracked.restored = None
            if self._role is Role.DECODE:
                lost[request_id] = tracked.computed
        return lost

    def build(self, output: SchedulerOutput) -> StepMetadata:
        """The step's metadata."""
        meta = StepMetadata(
            finished=self._finished,
            preempted=frozenset(output.preempted_req_ids or ()),
            scheduled_tokens=output.total_num_scheduled_tokens,
            restore=self._preempted(output.preempted_req_ids or ()),
        )
        self._finished = []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or state is None:
                continue
            groups = state.get_block_ids(request_id)
            if groups is None:
                continue
            tracked.block_ids = list(groups[0])
            start = starts[request_id]
            meta.requests.append(self._step(tracked, start, start + scheduled))
            if (
                self._role is Role.PREFILL
                and len(output.num_scheduled_tokens) == 1
                and start + scheduled <= tracked.request.num_prompt_tokens
            ):
                meta.single = (start, scheduled)
        return meta

    def _step(self, tracked: _Tracked, start: int, end: int) -> StepRequest:
        load: tuple[LoadBlock, ...] = ()
        load_again = False
        hit_blocks: int | None = None
        admitted = (
            tracked.load_due
        )  # a chunk may begin where the hit ends, too, after a failed load
        if tracked.load_due or (self._aliased and start):
            load_again = tracked.loaded_once or not tracked.load_due
            tracked.load_due = False
            tracked.loaded_once = True
            load = tuple(
                LoadBlock(index, self._engine_blocks(tracked, index))
                for index in range(self._blocks_to_load(tracked, start))
            )
        resumed: tuple[int, int] | None = None
        if tracked.preempted:
            tracked.preempted = False
            resumed = (start, max(0, tracked.computed - start))
        tracked.computed = end
        push: tuple[PushBlock, ...] = ()
        persist: tuple[PersistBlock, ...] = ()
        if self._role is Role.PREFILL:
            if admitted or start == 0:
                hit_blocks = start // self._layout.block_tokens
            push = self._pushes(tracked, start, end)
        else:
            # After a preemption or a failed load the step begins before blocks that were handed
            # over earlier, and those may have been dropped: hand them over again. Storing a
            # block that is there already costs a look-up.
            again = max(tracked.first_persist, start // self._layout.block_tokens)
            tracked.next_persist = min(tracked.next_persist, again)
            persist = self._persists(tracked, end)
        return StepRequest(
            request_id=tracked.request.request_id,
            rid=tracked.params.rid,
            attempt=tracked.params.attempt,
            load=load,
            load_again=load_again,
            hit_blocks=hit_blocks,
            push=push,
            persist=persist,
            held_blocks=len(tracked.block_ids),
            resumed=resumed,
        )

    def _blocks_to_load(self, tracked: _Tracked, start: int) -> int:
        if self._aliased:
            # All that was computed before, the last block perhaps partial. It is loaded whole,
            # before its layer begins and so before new tokens are written into it.
            return self._layout.blocks_for_tokens(start)
        if self._role is Role.PREFILL:
            return tracked.load_tokens // self._layout.block_tokens
        # The last block may be partial. It is loaded whole: the slots behind the prompt are
        # written by this and later steps, always after their layer was loaded.
        return self._layout.blocks_for_tokens(tracked.load_tokens)

    def _pushes(self, tracked: _Tracked, start: int, end: int) -> tuple[PushBlock, ...]:
        """Blocks that are complete after this step: whole ones, and the prompt's last. Where
        layers take turns every block that the step adds to."""
        layout = self._layout
        prompt = tracked.request.num_prompt_tokens
        if end > prompt:  # decoding on a PE: nothing of the prompt is new
            return ()
        complete = layout.blocks_for_tokens(end) if end == prompt else layout.full_blocks_in(end)
        last = layout.blocks_for_tokens(end) if self._aliased else complete
        return tuple(
            PushBlock(index, self._engine_blocks(tracked, index), complete=index < complete)
            for index in range(start // layout.block_tokens, last)
        )

    def _persists(self, tracked: _Tracked, end: int) -> tuple[PersistBlock, ...]:
        """Blocks whose tokens are all known and whose KV exists after this step."""
        size = self._layout.block_tokens
        tokens = tracked.request.all_token_ids
        complete = min(end, len(tokens)) // size
        blocks = tuple(
            PersistBlock(
                index,
                self._engine_blocks(tracked, index),
                tuple(tokens[index * size : (index + 1) * size]),
            )
            for index in range(tracked.next_persist, complete)
        )
        tracked.next_persist = max(tracked.next_persist, complete)
        return blocks

    def _engine_blocks(self, tracked: _Tracked, index: int) -> tuple[int, ...]:
        per_block = self._layout.engine_blocks_per_block
        return tuple(tracked.block_ids[index * per_block : (index + 1) * per_block])

    def finished(self, request: Request, aborted: bool) -> bool:
        """A request is over; True when its blocks must be kept until the worker is done."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            params = request_params(request)
            if params is not None:  # ended before it was ever scheduled
                self._finished.append(
                    FinishedRequest(
                        request.request_id, params.rid, params.attempt, ok=False, holds_blocks=False
                    )
                )
            return False
        persist: tuple[PersistBlock, ...] = ()
        if self._role is Role.DECODE and not aborted and tracked.block_ids:
            persist = self._persists(tracked, request.num_computed_tokens)
        self._finished.append(
            FinishedRequest(
                request.request_id,
                tracked.params.rid,
                tracked.params.attempt,
                ok=not aborted,
                holds_blocks=tracked.holds_blocks,
                persist=persist,
            )
        )
        return tracked.holds_blocks

    @property
    def has_news(self) -> bool:
        """The worker has not been told of a finished request yet."""
        return bool(self._finished)


def request_params(request: Request) -> RequestParams | None:
    """The front's parameters of a request; None when it is not one of the front's."""
    raw: Any = (request.kv_transfer_params or {}).get("dualpath")
    if raw is None:
        return None
    try:
        return msgspec.convert(raw, RequestParams)
    except msgspec.ValidationError as error:
        logger.error("request %s has bad dualpath parameters: %s", request.request_id, error)
        return None
