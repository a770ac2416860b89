"""The search over divisions, on a cluster whose capacity is a formula."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.plan.price import Prices
from dualpath.plan.search import Outcome, best_of, capacity, divisions, search

pytestmark = pytest.mark.unit


class Formula:
    """Carries ``min(3 * prefill, decode)`` agents a second; counts how often it is asked."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls = 0

    def __call__(self, prefill_nodes: int, decode_nodes: int, aps: float) -> Outcome:
        self.calls += 1
        met = aps <= self.scale * min(3 * prefill_nodes, decode_nodes)
        return Outcome(met, aps, 0.01, 100.0, aps * 1000, aps * 10)


def test_divisions() -> None:
    assert divisions(4) == [(1, 3), (2, 2), (3, 1)]
    with pytest.raises(ValueError, match="at least 2"):
        divisions(1)


@settings(deadline=None)
@given(st.floats(min_value=0.01, max_value=100), st.floats(min_value=0.05, max_value=20))
def test_capacity_is_found_from_any_guess(scale: float, guess: float) -> None:
    trial = Formula(scale)
    found, outcome = capacity(trial, 2, 6, guess)
    assert found <= 6 * scale <= found * 1.0501
    assert outcome is not None
    assert outcome.ttft_s == found
    assert trial.calls <= 24


def test_a_cluster_that_carries_nothing() -> None:
    trial = Formula(0.0)
    assert capacity(trial, 1, 1, 1.0) == (0.0, None)
    assert best_of(list(search(3, trial, 1.0))) is None
    with pytest.raises(ValueError, match="above 0"):
        capacity(trial, 1, 1, 0)


def test_the_best_division_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    found = list(search(8, Formula(), 1.0, report=lambda done, total: seen.append((done, total))))
    assert [(one.prefill_nodes, one.decode_nodes) for one in found] == divisions(8)
    best = best_of(found)
    assert best is not None
    assert (best.prefill_nodes, best.decode_nodes) == (2, 6)
    assert best.cost_per_million_tokens is None
    assert seen == [(done, 7) for done in range(1, 8)]


def test_prices_can_choose_another_division() -> None:
    plain = best_of(list(search(9, Formula(), 1.0)))
    priced = best_of(list(search(9, Formula(), 1.0, Prices(prefill_node=1, decode_node=100))))
    assert plain is not None
    assert priced is not None
    # 2 + 7 and 3 + 6 carry 6 agents/s alike, up to the tolerance they are found with.
    assert plain.aps == pytest.approx(6, rel=0.05)
    assert (priced.prefill_nodes, priced.decode_nodes) == (3, 6)
    assert priced.outcome is not None
    rate = priced.outcome.tokens_in_per_s + priced.outcome.tokens_out_per_s
    assert priced.cost_per_million_tokens == pytest.approx(603 / (rate * 3600) * 1e6)
