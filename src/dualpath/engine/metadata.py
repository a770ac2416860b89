"""What the scheduler half of the connector tells the worker half, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from dualpath.transfer.decode import PersistBlock
from dualpath.transfer.loads import LoadBlock
from dualpath.transfer.prefill import PushBlock


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's share of a step.

    Attributes:
        request_id: vLLM's id; ``rid`` and ``attempt`` name our session.
        load: blocks to bring into the cache before each layer needs them.
        hit_blocks: with a first step on a PE: leading blocks that are loaded, else None.
        push: blocks whose KV is complete after this step and belongs in the DE's buffer.
        persist: blocks completed by decoding in this step.
        held_blocks: engine blocks the request holds.
    """

    request_id: str
    rid: str
    attempt: int
    load: tuple[LoadBlock, ...] = ()
    hit_blocks: int | None = None
    push: tuple[PushBlock, ...] = ()
    persist: tuple[PersistBlock, ...] = ()
    held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that vLLM has ended; its blocks are freed when nothing uses them any more."""

    request_id: str
    rid: str
    attempt: int
    ok: bool
    holds_blocks: bool
    persist: tuple[PersistBlock, ...] = ()


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Everything of one step.

    ``single``: ``(cached, bsz)`` of a PE's step that computes prompt tokens of one request and
    nothing else; None for any other step.
    """

    requests: list[StepRequest] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    scheduled_tokens: int = 0
    single: tuple[int, int] | None = None
