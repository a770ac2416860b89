"""Read path of the paper: the side whose node's disk read queue is shorter."""

from __future__ import annotations

from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Node
from dualpath.scheduler.types import ReadPlan, Request


class Policy:
    """Equal queues read on the PE's side, as a system without the second way would."""

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings

    def plan(self, request: Request, prefill: Node, decode: Node) -> ReadPlan:
        """O(1)."""
        if decode.read_q < prefill.read_q:
            return ReadPlan(0, request.hit_tokens)
        return ReadPlan(request.hit_tokens, 0)
