"""Prompt tokens of the work served: what ``dualpath profile`` takes a hit ratio from."""

from __future__ import annotations

from dualpath.measuring import is_measurement
from dualpath.serve.body import Call
from dualpath.serve.record import Outcome, Record


class PromptTally:
    """Hit and miss tokens of requests that succeeded, without those of earlier measurements:
    their prompts are made to hit, or not to, and say nothing about the work."""

    def __init__(self) -> None:
        self.hit = 0
        self.miss = 0

    def add(self, call: Call, record: Record) -> None:
        """Count a request that has ended."""
        if record.outcome == Outcome.OK.value and not is_measurement(call.body):
            self.hit += record.hit_tokens
            self.miss += record.prompt_tokens - record.hit_tokens
