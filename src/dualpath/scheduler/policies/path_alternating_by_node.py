"""Read path of the ablation where a node has one engine: each DE's node and the PE in turn."""

from __future__ import annotations

from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Node
from dualpath.scheduler.types import ReadPlan, Request


class Policy:
    """As ``alternating``, with a turn of its own for every DE node.

    Engines in turn and paths in turn keep step with each other: of two DEs with a NIC each, one
    would get every request that its side reads and the other none. Where nodes have several
    engines the steps differ, and ``alternating`` does.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings
        self._decode_next: dict[str, bool] = {}

    def plan(self, request: Request, prefill: Node, decode: Node) -> ReadPlan:
        """O(1)."""
        del prefill
        on_decode = self._decode_next.get(decode.name, False)
        self._decode_next[decode.name] = not on_decode
        return ReadPlan(0, request.hit_tokens) if on_decode else ReadPlan(request.hit_tokens, 0)
