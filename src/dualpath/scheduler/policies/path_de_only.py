"""Read path through the second way in alone, for tests and measurements: always the DE's side."""

from __future__ import annotations

from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Node
from dualpath.scheduler.types import ReadPlan, Request


class Policy:
    """Looks at nothing."""

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings

    def plan(self, request: Request, prefill: Node, decode: Node) -> ReadPlan:
        """O(1)."""
        del prefill, decode
        return ReadPlan(0, request.hit_tokens)
