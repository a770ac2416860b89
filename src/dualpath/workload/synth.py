"""Synthetic workloads: agents that meet Table 2 of the paper, and plain regular ones.

Table 2 (arXiv 2602.21548) gives five means for each of three context limits. No published
distribution goes with them, and ``turns * (append + gen)`` exceeds ``total`` by 60-70 %, so append
and gen can only be means of per-trajectory means. The generator below meets all five columns at
once under that reading (context too is then a mean over trajectories of their mean prompts);
``workload.stats`` prints both readings.

Every trajectory has a random stream of its own, named by (seed, row, index): trajectory 700 is
the same whether or not the 699 before it were made, and nothing is kept in memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dualpath.workload.latency import LogNormal, with_latency
from dualpath.workload.trace import Round, Trajectory

APPEND_SIGMA: Final = 1.6
GEN_SIGMA: Final = 1.1
CORRELATION: Final = 0.07
MAX_APPEND_SHARE: Final = 0.4
PAPER_TRAJECTORIES: Final = 500


@dataclass(frozen=True, slots=True)
class Row:
    """Parameters of one row of Table 2.

    First append ``A_1 ~ LN(first_append, first_sigma)``; later ones ``A_i = m_j * (1 + i) **
    -decay * LN(unit mean, 1.6)``; answers ``g_i = G_j * LN(unit mean, 1.1)``; per trajectory
    ``m_j ~ LN(append, append_sigma)`` and ``G_j ~ LN(gen, gen_sigma)``, logarithms correlated by
    0.07. ``LN(median, sigma)``. An append is capped at 0.4 of the limit; the round that would
    cross the limit is dropped and ends the trajectory; each round may be the last with
    probability ``stop``.

    Attributes:
        name: row of the table.
        max_tokens: context limit.
        paper: the table's own turns, append, gen, total, mean context.
        seed: freezes the row's 500 trajectories. Draws of 500 scatter (append by 6-10 %); of the
            seeds 0 to 399 this one comes nearest to ``paper`` in its worst column (within 0.8, 1.5
            and 1 %).
    """

    name: str
    max_tokens: int
    append: float
    append_sigma: float
    decay: float
    first_append: float
    first_sigma: float
    gen: float
    gen_sigma: float
    stop: float
    paper: tuple[float, float, float, float, float]
    seed: int


ROWS: Final[dict[str, Row]] = {
    row.name: row
    for row in (
        Row("32k", 32 * 1024, 609, 0.807, 0.206, 4076, 0.531, 138.8, 0.284, 0.0031,
            (60, 608, 148, 28_639, 17_183), 63),
        Row("48k", 48 * 1024, 589, 0.914, 0.283, 4455, 0.571, 159.0, 0.301, 0.0023,
            (106, 474, 172, 42_607, 25_120), 183),
        Row("64k", 64 * 1024, 590, 1.031, 0.323, 4751, 0.571, 162.5, 0.309, 0.0018,
            (157, 429, 176, 55_958, 32_721), 161),
    )
}  # fmt: skip


def synthesise(
    row: Row, count: int = PAPER_TRAJECTORIES, seed: int | None = None
) -> Iterator[Trajectory]:
    """``count`` trajectories of a row, no tool latency. Without ``seed``, of its frozen draw."""
    for index in range(count):
        yield _trajectory(row, row.seed if seed is None else seed, index)


def regular(
    agents: int, turns: int, append_tokens: int, gen_tokens: int, first_append_tokens: int = 0
) -> Iterator[Trajectory]:
    """Agents that all do the same: for demonstrations and hand-worked tests.

    Args:
        agents, turns: how many.
        append_tokens, gen_tokens: of every turn.
        first_append_tokens: of the first turn; ``append_tokens`` when 0.

    Raises:
        ValueError: there would be nothing to send.
    """
    first = first_append_tokens or append_tokens
    for name, value in (("agents", agents), ("turns", turns), ("append", first)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, value in (("append", append_tokens), ("gen", gen_tokens)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    appends = [first, *[append_tokens] * (turns - 1)]
    rounds = _finish([Round(append, gen_tokens, 0.0) for append in appends])
    for index in range(agents):
        yield Trajectory(f"regular-{index}", rounds)


def with_tool_latency(
    trajectories: Iterator[Trajectory], median_s: float, sigma: float, seed: int
) -> Iterator[Trajectory]:
    """The same trajectories with log-normal tool latencies between their rounds.

    Public coding-agent sessions show a median of 11 s and a sigma of 1.2. Other distributions:
    ``workload.latency``.
    """
    return with_latency(trajectories, LogNormal(median_s, sigma), seed)


def _trajectory(row: Row, seed: int, index: int) -> Trajectory:
    rng = random.Random(f"synth:{seed}:{row.name}:{index}")
    one = rng.gauss(0.0, 1.0)
    other = CORRELATION * one + math.sqrt(1 - CORRELATION**2) * rng.gauss(0.0, 1.0)
    append_scale = row.append * math.exp(row.append_sigma * one)
    gen_scale = row.gen * math.exp(row.gen_sigma * other)
    cap = int(MAX_APPEND_SHARE * row.max_tokens)
    rounds: list[Round] = []
    total = 0
    while True:
        if not rounds:
            append = _log_normal(rng, row.first_append, row.first_sigma)
        else:
            decay = (1 + len(rounds)) ** -row.decay
            append = append_scale * decay * _unit_mean(rng, APPEND_SIGMA)
        append_tokens = min(cap, max(1, round(append)))
        gen_tokens = max(1, round(gen_scale * _unit_mean(rng, GEN_SIGMA)))
        total += append_tokens + gen_tokens
        if total > row.max_tokens and rounds:
            break
        rounds.append(Round(append_tokens, gen_tokens, 0.0))
        if rng.random() < row.stop:
            break
    return Trajectory(f"synth-{row.name}-{seed}-{index}", _finish(rounds))


def _finish(rounds: list[Round]) -> tuple[Round, ...]:
    """Nothing follows the last round, so it has no latency."""
    last = rounds[-1]
    return (*rounds[:-1], Round(last.append_tokens, last.gen_tokens, None))


def _log_normal(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))


def _unit_mean(rng: random.Random, sigma: float) -> float:
    return math.exp(sigma * rng.gauss(0.0, 1.0) - sigma * sigma / 2)
