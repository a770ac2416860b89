"""Rounds from what request logs record: lengths of whole prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.workload.trace import Round


def rounds_of(
    lengths: Sequence[tuple[int, int]], latencies_s: Sequence[float]
) -> tuple[tuple[Round, ...], int]:
    """Rounds of consecutive requests.

    An append is what a prompt has beyond the prompt and answer before it. Where it has nothing
    more (answers are recorded with tokens that later prompts leave out) it is taken as 1 token. So
    is an answer of no tokens: it was asked for all the same, which a trace's 0 denies.

    Args:
        lengths: prompt and answer tokens of each request.
        latencies_s: time after each but the last.

    Returns:
        The rounds, and how many appends were taken as 1.
    """
    rounds: list[Round] = []
    context = clamped = 0
    for index, (prompt, recorded) in enumerate(lengths):
        answer = max(1, recorded)
        append = prompt - context
        if append < 1:
            clamped += 1
            append = 1
        latency = latencies_s[index] if index + 1 < len(lengths) else None
        rounds.append(Round(append, answer, latency))
        context = prompt + answer
    return tuple(rounds), clamped
