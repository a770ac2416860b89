"""What goes into the scheduler and what comes out of it.

Everything here is an immutable msgspec struct rather than a dataclass: these values are written to
the decision log as they stand, and creating one costs a tenth of creating a frozen dataclass, which
at 100,000 decisions a second is the difference that matters.
"""

from __future__ import annotations

import enum
import math

import msgspec

from dualpath.config import Role


class SchedulerError(ValueError):
    """The caller broke the scheduler's contract (an engine added twice, a request unknown)."""


class EngineSpec(msgspec.Struct, frozen=True):
    """An engine that joins.

    Attributes:
        name: unique among the registered engines.
        role: prefill or decode; all engines of a group have the same.
        group: the engines that fetch together.
        node: the machine whose SNIC the engine reads through; a node lies in one group.
        hbm_tokens: KV capacity of a DE in tokens; ignored for a PE.
        read_tokens_per_s: SNIC rate of the node in tokens a second, used by ``split``; 0 when it
            is not known or not limited.

    Raises:
        ValueError: an empty name, a negative figure, or a DE without HBM.
    """

    name: str
    role: Role
    group: str
    node: str
    hbm_tokens: int = 0
    read_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("name", "group", "node"):
            if not getattr(self, field):
                raise ValueError(f"{field} of an engine must not be empty")
        if self.role is Role.DECODE and self.hbm_tokens <= 0:
            raise ValueError(f"hbm_tokens of {self.name} must be positive, got {self.hbm_tokens}")
        if not 0 <= self.read_tokens_per_s < math.inf:
            raise ValueError(
                f"read_tokens_per_s of {self.name} must be finite and not negative, "
                f"got {self.read_tokens_per_s}"
            )


class Request(msgspec.Struct, frozen=True, gc=False):
    """One round of an agent.

    Attributes:
        rid: unique among the requests that are queued or assigned.
        prompt_tokens: length of the prompt, hit and miss.
        hit_tokens: leading prompt tokens whose KV is stored: whole blocks.
        max_new_tokens: most tokens that will be generated.
        block_tokens: tokens in a Full Block.

    Raises:
        ValueError: a figure is out of range or the hit is not whole blocks.
    """

    rid: str
    prompt_tokens: int
    hit_tokens: int
    max_new_tokens: int
    block_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_new_tokens < 0 or self.block_tokens < 1:
            raise ValueError(
                f"{self.rid}: prompt_tokens {self.prompt_tokens} and block_tokens "
                f"{self.block_tokens} must be positive and max_new_tokens "
                f"{self.max_new_tokens} not negative"
            )
        if not 0 <= self.hit_tokens <= self.prompt_tokens or self.hit_tokens % self.block_tokens:
            raise ValueError(
                f"{self.rid}: hit_tokens {self.hit_tokens} must be whole blocks of "
                f"{self.block_tokens} within the prompt's {self.prompt_tokens}"
            )

    @property
    def hbm_tokens(self) -> int:
        """HBM a DE promises to this request: prompt and answer, rounded up to whole blocks."""
        block = self.block_tokens
        return -(-(self.prompt_tokens + self.max_new_tokens) // block) * block


class EngineReport(msgspec.Struct, frozen=True, gc=False):
    """An engine's state, as its group's leader tells it when it fetches.

    A report replaces what the scheduler counted by itself, so it must say what it does not know
    yet: ``missing`` names the requests that were assigned (returned by a fetch) but had not reached
    the engine when the report was taken. Their tokens are added on top.

    Attributes:
        engine: who reports.
        seq: seq_e, requests assigned and not finished; None leaves the scheduler's own count, which
            is exact when every request goes through it.
        tok: tok_e, the sum of their prompt tokens; None together with ``seq``.
        read_q: tokens waiting in the disk read queue of the engine's NODE; None leaves the
            scheduler's own count. Of several reports of one node in a fetch the largest stands.
        hbm_used: KV tokens held in a DE's HBM.
        missing: rids assigned but unknown to the engine at the time of the report.

    Raises:
        ValueError: a negative figure, or only one of ``seq`` and ``tok``.
    """

    engine: str
    seq: int | None
    tok: int | None
    read_q: int | None
    hbm_used: int = 0
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.seq is None) != (self.tok is None):
            raise ValueError(f"report of {self.engine}: seq and tok come together or not at all")
        if (self.tok or 0) < 0 or (self.seq or 0) < 0 or (self.read_q or 0) < 0:
            raise ValueError(f"report of {self.engine}: a count is negative: {self}")
        if self.hbm_used < 0:
            raise ValueError(f"report of {self.engine}: hbm_used {self.hbm_used} is negative")


class ReadPath(enum.Enum):
    """Which side's SNIC reads the hit blocks."""

    PREFILL = "pe"
    DECODE = "de"
    SPLIT = "split"


class ReadPlan(msgspec.Struct, frozen=True, gc=False):
    """Who reads what, in tokens (whole blocks; their sum is the hit).

    The prefill side reads the first ``prefill_tokens`` of the hit, the decode side the rest.
    """

    prefill_tokens: int
    decode_tokens: int

    @property
    def path(self) -> ReadPath:
        """The way the hit blocks come in; the PE read path when there are none."""
        if self.decode_tokens == 0:
            return ReadPath.PREFILL
        return ReadPath.SPLIT if self.prefill_tokens else ReadPath.DECODE


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """A decision: the request's read may start now."""

    rid: str
    prefill: str
    decode: str
    read: ReadPlan


class RejectReason(enum.Enum):
    """Why a request can never be served."""

    LARGER_THAN_HBM = "larger-than-hbm"


class Rejection(msgspec.Struct, frozen=True):
    """A request that the scheduler has dropped for good; ``detail`` is one line for a person."""

    rid: str
    reason: RejectReason
    detail: str = ""


class Decisions(msgspec.Struct, frozen=True):
    """Outcome of one fetch. ``assigned`` is in the order of the decisions."""

    assigned: tuple[Assignment, ...] = ()
    rejected: tuple[Rejection, ...] = ()


class EngineLoad(msgspec.Struct, frozen=True):
    """How the scheduler sees an engine now; units as in ``EngineReport``.

    ``hbm_free`` is what further requests may be promised (0 for a PE); ``active`` is False while
    the engine is drained.
    """

    name: str
    role: Role
    group: str
    node: str
    active: bool
    seq: int
    tok: int
    read_q: int
    hbm_free: int


class Snapshot(msgspec.Struct, frozen=True):
    """Figures for metrics.

    Attributes:
        waiting_prefill: requests without a PE.
        waiting_decode: requests without a DE, whether in the global queue or a group's own.
        parked: those of ``waiting_decode`` that no active DE could ever hold.
        assigned: requests with both sides, not finished.
        submitted, completed, rejected: totals since the start (completed = assignments returned).
        stale_reports: reports of engines that are not registered any more.
        engines: every registered engine.
    """

    waiting_prefill: int
    waiting_decode: int
    parked: int
    assigned: int
    submitted: int
    completed: int
    rejected: int
    stale_reports: int
    engines: tuple[EngineLoad, ...]
