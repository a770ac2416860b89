"""Read path beyond the paper: both sides read one request and finish together."""

from __future__ import annotations

import math

from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Node
from dualpath.scheduler.types import ReadPlan, Request


class Policy:
    """Divide the h hit tokens so that (q_pe + x) / bw_pe = (q_de + h - x) / bw_de.

    x is rounded to whole blocks, whichever of down and up ends sooner; one side alone when that is
    no slower (PE side first). If the rate of either node is unknown (0), both count as equal.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        del settings

    def plan(self, request: Request, prefill: Node, decode: Node) -> ReadPlan:
        """O(1)."""
        hit, block = request.hit_tokens, request.block_tokens
        rate_pe, rate_de = prefill.read_tokens_per_s, decode.read_tokens_per_s
        if not (rate_pe and rate_de):
            rate_pe = rate_de = 1.0
        queue_pe, queue_de = prefill.read_q, decode.read_q
        even = ((hit + queue_de) * rate_pe - queue_pe * rate_de) / (rate_pe + rate_de)
        down = min(max(int(even // block) * block, 0), hit)
        best, best_end_s = 0, math.inf
        for tokens in (hit, 0, down, min(down + block, hit)):
            rest = hit - tokens
            end_s = max(
                (queue_pe + tokens) / rate_pe if tokens else 0.0,
                (queue_de + rest) / rate_de if rest else 0.0,
            )
            if end_s < best_end_s:
                best, best_end_s = tokens, end_s
        return ReadPlan(best, hit - best)
