"""Read path of the ablation: PE side, DE side, PE side, and so on."""

from __future__ import annotations

from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Node
from dualpath.scheduler.types import ReadPlan, Request


class Policy:
    """Begins with the PE's side; a request without hits takes no turn (it is never asked about)."""

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings
        self._decode_next = False

    def plan(self, request: Request, prefill: Node, decode: Node) -> ReadPlan:
        """O(1)."""
        del prefill, decode
        on_decode = self._decode_next
        self._decode_next = not on_decode
        return ReadPlan(0, request.hit_tokens) if on_decode else ReadPlan(request.hit_tokens, 0)
