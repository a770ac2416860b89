"""The best division of some nodes into prefill and decode, by trying divisions under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from dualpath.plan.price import Prices

TOLERANCE: Final = 0.05
_MAX_DOUBLINGS: Final = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cluster did at a load.

    Attributes:
        slo_met: whether the limits were kept.
        ttft_s, tpot_s: means; None when nothing was measured.
        jct_s: mean life of the agents that finished; None when none did.
        tokens_in_per_s, tokens_out_per_s: of the load, which a cluster that keeps up serves.
    """

    slo_met: bool
    ttft_s: float | None
    tpot_s: float | None
    jct_s: float | None
    tokens_in_per_s: float
    tokens_out_per_s: float


class Trial(Protocol):
    """Runs a load on a division. Called once for each load tried, never twice at a time."""

    def __call__(self, prefill_nodes: int, decode_nodes: int, aps: float) -> Outcome:
        """How ``prefill_nodes`` + ``decode_nodes`` nodes do with ``aps`` agents arriving a
        second. Failures of the trial itself are raised and end the search."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A division and the highest load it was seen to carry.

    Attributes:
        prefill_nodes, decode_nodes: the division.
        aps: agents a second; 0 when even the lightest load tried broke the limits.
        outcome: at that load; None when ``aps`` is 0.
        cost_per_million_tokens: of prompt and answer tokens together; None without prices.
    """

    prefill_nodes: int
    decode_nodes: int
    aps: float
    outcome: Outcome | None
    cost_per_million_tokens: float | None


def divisions(nodes: int) -> list[tuple[int, int]]:
    """All (prefill, decode) divisions of ``nodes``, both at least 1.

    Raises:
        ValueError: fewer than 2 nodes.
    """
    if nodes < 2:
        raise ValueError(f"nodes: at least 2 are needed, one of each kind, got {nodes}")
    return [(prefill, nodes - prefill) for prefill in range(1, nodes)]


def capacity(
    trial: Trial,
    prefill_nodes: int,
    decode_nodes: int,
    guess_aps: float,
    tolerance: float = TOLERANCE,
) -> tuple[float, Outcome | None]:
    """The highest load within the limits, to a relative ``tolerance``, and what it was like.

    Loads are doubled or halved from ``guess_aps`` until the limit is between two, then bisected;
    given up at 2 ** 20 times the guess either way. What is returned was tried and kept the limits.

    Raises:
        ValueError: the guess is not above 0.
    """
    if guess_aps <= 0:
        raise ValueError(f"guess_aps: must be above 0, got {guess_aps}")
    good, best = 0.0, None
    bad, load = None, guess_aps
    for _ in range(_MAX_DOUBLINGS):
        outcome = trial(prefill_nodes, decode_nodes, load)
        if outcome.slo_met:
            good, best = load, outcome
            if bad is not None:
                break
            load *= 2
        else:
            bad = load
            if best is not None:
                break
            load /= 2
    if best is None or bad is None:
        return good, best
    while bad > good * (1 + tolerance):
        load = (good + bad) / 2
        outcome = trial(prefill_nodes, decode_nodes, load)
        if outcome.slo_met:
            good, best = load, outcome
        else:
            bad = load
    return good, best


def search(
    nodes: int,
    trial: Trial,
    guess_aps: float,
    prices: Prices | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Candidate]:
    """Every division of ``nodes`` with its capacity, in order of prefill nodes.

    Args:
        nodes: to divide.
        trial: runs a load.
        guess_aps: a load of the right order; later divisions start from the last one's capacity.
        prices: adds the cost of tokens.
        report: told after each division how many of how many are done.

    Raises:
        ValueError: fewer than 2 nodes.
    """
    found = divisions(nodes)
    for done, (prefill, decode) in enumerate(found, 1):
        aps, outcome = capacity(trial, prefill, decode, guess_aps)
        guess_aps = aps or guess_aps
        cost = None
        if prices is not None and outcome is not None:
            rate = outcome.tokens_in_per_s + outcome.tokens_out_per_s
            cost = prices.per_million_tokens(prefill, decode, rate)
        yield Candidate(prefill, decode, aps, outcome, cost)
        report(done, len(found))


def best_of(candidates: list[Candidate]) -> Candidate | None:
    """The cheapest tokens when they are priced, else the most agents; None when none carries any.

    Ties go to fewer prefill nodes.
    """
    able = [one for one in candidates if one.outcome is not None]
    if not able:
        return None
    if all(one.cost_per_million_tokens is not None for one in able):
        return min(able, key=lambda one: (one.cost_per_million_tokens or 0.0, one.prefill_nodes))
    return max(able, key=lambda one: (one.aps, -one.prefill_nodes))
