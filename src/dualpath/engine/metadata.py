"""What the scheduler half of the connector tells the worker half, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from dualpath.transfer.decode import PersistBlock
from dualpath.transfer.exports import PushBlock
from dualpath.transfer.loads import LoadBlock


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's share of a step.

    Attributes:
        request_id: vLLM's id; ``rid`` and ``attempt`` name our session.
        load: blocks to bring into the cache before each layer needs them.
        hit_blocks: with a first step on a PE: leading blocks that are loaded, else None.
        load_again: they were in the cache before; see ``LayerLoad``.
        push: blocks whose KV is complete after this step and belongs in the DE's buffer; where
            layers take turns also the one that the step leaves incomplete.
        persist: blocks completed by decoding in this step.
        held_blocks: engine blocks the request holds.
        resumed: with the first step after a preemption: tokens whose KV comes back, and tokens
            that had KV and are computed again; else None.
    """

    request_id: str
    rid: str
    attempt: int
    load: tuple[LoadBlock, ...] = ()
    load_again: bool = False
    hit_blocks: int | None = None
    push: tuple[PushBlock, ...] = ()
    persist: tuple[PersistBlock, ...] = ()
    held_blocks: int = 0
    resumed: tuple[int, int] | None = None


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
    ``restore``: on a DE, of each request preempted, the tokens that had KV.
    """

    requests: list[StepRequest] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    scheduled_tokens: int = 0
    single: tuple[int, int] | None = None
    restore: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker half tells the scheduler half at the end of a step.

    ``restored``: of preempted requests, the leading blocks that are in host memory again.
    """

    restored: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Both together; vLLM asks for it with several workers an engine, which is refused."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata({**self.restored, **other.restored})
