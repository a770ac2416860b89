"""What a trace asks for, in the terms of the paper's Table 2.

Append, gen and context have two readings, and append's differ by a factor of two on real traces:
*macro*, the mean over trajectories of each trajectory's own mean (a long trajectory counts once),
and *request*, the mean over all rounds. Both are given; constant memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dualpath.workload.trace import Trajectory


@dataclass(frozen=True, slots=True)
class Reading:
    """Means in tokens under one reading."""

    append: float
    gen: float
    context: float


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Figures of a trace.

    Attributes:
        trajectories, requests: counts.
        turns: mean rounds of a trajectory.
        total: mean length of a trajectory's final context, tokens.
        macro, request: append, gen and context (prompt length) under both readings.
        max_context: longest prompt plus its answer, tokens.
        tokens_in, tokens_out: prompts (hit and miss) and answers, all requests together.
        hit_ratio: share of prompt tokens that an unbounded cache without block rounding already
            has: everything but each round's append.
        tool_latency_s: mean over the rounds that state one; None when none does.
    """

    trajectories: int
    requests: int
    turns: float
    total: float
    macro: Reading
    request: Reading
    max_context: int
    tokens_in: int
    tokens_out: int
    hit_ratio: float
    tool_latency_s: float | None

    def to_json(self) -> dict[str, Any]:
        """As plain objects."""
        return asdict(self)


def trace_stats(trajectories: Iterable[Trajectory]) -> TraceStats:
    """One pass over ``trajectories``.

    Raises:
        ValueError: there are none.
    """
    count = requests = tokens_in = tokens_out = appended = total = longest = 0
    macro_append = macro_gen = macro_context = 0.0
    latency_s, latencies = 0.0, 0
    for trajectory in trajectories:
        rounds = trajectory.rounds
        prompts = list(trajectory.prompts_tokens())
        appends = sum(item.append_tokens for item in rounds)
        gens = sum(item.gen_tokens for item in rounds)
        count += 1
        requests += len(rounds)
        tokens_in += sum(prompts)
        tokens_out += gens
        appended += appends
        total += appends + gens
        longest = max(longest, appends + gens)
        macro_append += appends / len(rounds)
        macro_gen += gens / len(rounds)
        macro_context += sum(prompts) / len(rounds)
        for item in rounds:
            if item.tool_latency_s is not None:
                latency_s += item.tool_latency_s
                latencies += 1
    if not count:
        raise ValueError("there are no trajectories")
    return TraceStats(
        trajectories=count,
        requests=requests,
        turns=requests / count,
        total=total / count,
        macro=Reading(macro_append / count, macro_gen / count, macro_context / count),
        request=Reading(appended / requests, tokens_out / requests, tokens_in / requests),
        max_context=longest,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        hit_ratio=1 - appended / tokens_in,
        tool_latency_s=latency_s / latencies if latencies else None,
    )
