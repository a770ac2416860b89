"""A client's request over all its tries, and what every request uses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dualpath.config import ClusterConfig
from dualpath.serve.body import Call
from dualpath.serve.closing import Closer
from dualpath.serve.dispatch import Dispatcher
from dualpath.serve.epoch import WeightEpoch
from dualpath.serve.first_token import EngineHabits, FirstToken
from dualpath.serve.index import BlockIndex
from dualpath.serve.members import Members
from dualpath.serve.metrics import FrontMetrics
from dualpath.serve.modes import ModePlan
from dualpath.serve.record import Record
from dualpath.serve.reply import Reply
from dualpath.serve.tempo import Tempo
from dualpath.serve.upstream import Upstream


@dataclass(slots=True)
class Services:
    """What every request uses."""

    config: ClusterConfig
    members: Members
    dispatcher: Dispatcher
    index: BlockIndex
    epoch: WeightEpoch
    upstream: Upstream
    closer: Closer
    metrics: FrontMetrics
    habits: EngineHabits


@dataclass(slots=True)
class Turn:
    """A request over all its tries.

    Attributes:
        tenant: who asks, part of every key.
        deadline: loop time at which the request ends whatever happens.
        first: token 1, once the PE has sampled it for the client; a later try keeps it.
        committed: part of the DE's answer has been sent, so no other try is possible.
        complete: every chunk of a stream has been sent, all but ``[DONE]``: a client that leaves
            now has its answer, and the turn counts as done.
        tempo: when the answer's tokens came.
    """

    rid: str
    call: Call
    tenant: str
    plan: ModePlan
    deadline: float
    record: Record
    reply: Reply
    prompt_ids: list[int] = field(default_factory=list)
    first: FirstToken | None = None
    committed: bool = False
    complete: bool = False
    tempo: Tempo = field(default_factory=Tempo)

    @property
    def answer_id(self) -> str:
        """Id of the response."""
        return f"{'chatcmpl' if self.call.is_chat else 'cmpl'}-{self.rid}"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())
