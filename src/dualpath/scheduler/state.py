"""Mutable state of the scheduler: engines, their nodes and groups, and requests.

Plain slotted objects, changed by ``cluster.Cluster`` only; policies read them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from dualpath.config import Role
from dualpath.scheduler.types import EngineSpec, Request

Queue = OrderedDict[str, "Entry"]
"""Requests by rid in order of arrival: both ends and any member go in O(1)."""


class Node:
    """A machine: its read queue is shared by its engines.

    ``known`` is what is left of the last report in ``read_q``; the rest are reads that this report
    does not know. ``epoch`` numbers the reports, so that a read can tell which it is.
    ``readers`` counts requests whose read is not known to be over.
    """

    __slots__ = (
        "engines", "epoch", "group", "known", "name", "read_q", "read_tokens_per_s", "readers",
    )  # fmt: skip

    def __init__(self, name: str, group: Group) -> None:
        self.name: Final = name
        self.group: Final = group
        self.engines: dict[str, Engine] = {}
        self.read_tokens_per_s = 0.0
        self.read_q = 0
        self.known = 0
        self.epoch = 0
        self.readers = 0


class Group:
    """Engines that fetch together.

    Sums run over ``active`` engines: a drained one is no member of its group.

    Attributes:
        active: engines that may get work, in order of registration.
        tok, miss, free: their tokens, tokens to be computed (see ``Engine``) and free HBM.
        queue, queued: the private queue (DE groups) and its prompt tokens.
        largest: the largest HBM among ``active``: nothing larger may enter the private queue.
        index_key: key of this group's live entry in the group index.
    """

    __slots__ = (
        "active", "engines", "free", "index_key", "largest", "last_fetch_s", "miss", "name",
        "queue", "queued", "rank", "role", "tok",
    )  # fmt: skip

    def __init__(self, name: str, role: Role, rank: int) -> None:
        self.name: Final = name
        self.role: Final = role
        self.rank: Final = rank
        self.engines: dict[str, Engine] = {}
        self.active: list[Engine] = []
        self.tok = 0
        self.miss = 0
        self.free = 0
        self.largest = 0
        self.queue: Queue = OrderedDict()
        self.queued = 0
        self.index_key = -1
        self.last_fetch_s: float | None = None

    @property
    def total(self) -> int:
        """Total tok_e of the group, its private queue included."""
        return self.tok + self.queued


class Engine:
    """One engine.

    ``known_*`` is what is left of the last report in ``tok`` and ``seq``; the rest are assignments
    which that report does not know. ``half_*`` are those of them whose requests still lack their
    other side: no fetch has returned them, so no report can know them.

    ``miss`` are the miss tokens of every request on a PE until its prefill is over: always counted
    here, since no report tells them.

    ``promised`` is the HBM of every request assigned and not finished, all its life long; ``free``
    is what is left. ``used`` and ``promised`` overlap, since a promise is kept by using it, so the
    larger of the two counts.
    """

    __slots__ = (
        "active", "capacity", "epoch", "free", "group", "half_seq", "half_tok", "holds",
        "known_seq", "known_tok", "miss", "name", "node", "promised", "rank", "reported_s",
        "role", "seq", "tok", "used",
    )  # fmt: skip

    def __init__(self, spec: EngineSpec, node: Node, group: Group, rank: int) -> None:
        self.name: Final = spec.name
        self.role: Final = spec.role
        self.node: Final = node
        self.group: Final = group
        self.rank: Final = rank
        self.capacity: Final = spec.hbm_tokens if spec.role is Role.DECODE else 0
        self.active = False
        self.tok = self.known_tok = self.half_tok = 0
        self.seq = self.known_seq = self.half_seq = 0
        self.miss = 0
        self.epoch = 0
        self.used = 0
        self.promised = 0
        self.free = self.capacity
        self.holds: dict[str, Hold] = {}
        self.reported_s: float | None = None


class Entry:
    """A request inside the scheduler, from ``submit`` to ``finish``.

    ``group`` is set while the request waits in that group's private queue. ``prefill`` and
    ``decode`` are what it holds on either side. ``complete`` once both were chosen.
    """

    __slots__ = (
        "arrival", "complete", "decode", "group", "miss", "need", "prefill", "request", "rid",
        "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, arrival: int) -> None:
        self.request: Final = request
        self.rid: Final = request.rid
        self.tokens: Final = request.prompt_tokens
        self.miss: Final = request.prompt_tokens - request.hit_tokens
        self.need: Final = request.hbm_tokens
        self.arrival: Final = arrival
        self.complete = False
        self.group: Group | None = None
        self.prefill: Hold | None = None
        self.decode: Hold | None = None


class Hold:
    """What one request takes on one engine.

    ``delivered`` once a fetch has returned the assignment; ``epoch`` is then the engine's epoch
    whose report does not know it. ``read`` are the tokens to be read through the node's SNIC and
    not known to have been; ``read_epoch`` likewise.
    """

    __slots__ = ("delivered", "engine", "entry", "epoch", "need", "read", "read_epoch")

    def __init__(self, entry: Entry, engine: Engine, need: int) -> None:
        self.entry: Final = entry
        self.engine: Final = engine
        self.need: Final = need
        self.delivered = False
        self.epoch = 0
        self.read = 0
        self.read_epoch = 0
