"""When an online run ends by the published rule."""

from __future__ import annotations

import pytest
from sim_kit import agent, small

from dualpath.sim import simulate
from dualpath.sim.steady import BEFORE_S, LONGEST_S, WINDOW_S, End, SteadyRule

pytestmark = pytest.mark.unit
LIMIT_S = 4.0


def fed(*parts: tuple[float, float, float]) -> SteadyRule:
    """First tokens once a second: from, until, TTFT."""
    rule = SteadyRule(LIMIT_S)
    for start_s, until_s, ttft_s in parts:
        for second in range(int(start_s), int(until_s)):
            rule.first_token(second, ttft_s)
    return rule


def test_nothing_is_said_before_half_an_hour_and_a_window() -> None:
    whole = BEFORE_S + WINDOW_S
    rule = fed((0, whole, 1.0))
    assert rule.end(WINDOW_S - 1) is None
    assert rule.end(whole - 20) is None
    assert rule.end(whole) is End.STEADY


@pytest.mark.parametrize(("later_s", "end"), [(1.04, End.STEADY), (1.06, None), (0.94, None)])
def test_steady_is_less_than_five_percent(later_s: float, end: End | None) -> None:
    rule = fed((0, BEFORE_S, 1.0), (BEFORE_S, BEFORE_S + WINDOW_S, later_s))
    assert rule.end(BEFORE_S + WINDOW_S) is end


def test_a_ttft_above_its_limit_ends_it_at_once() -> None:
    rule = fed((0, WINDOW_S, LIMIT_S + 0.1))
    assert rule.end(WINDOW_S) is End.EXCEEDED
    assert fed((0, WINDOW_S, LIMIT_S)).end(WINDOW_S) is None


def test_what_never_becomes_either_is_given_up() -> None:
    assert SteadyRule(LIMIT_S).end(LONGEST_S) is None
    assert SteadyRule(LIMIT_S).end(LONGEST_S + 1) is End.GIVEN_UP


def test_a_run_until_it_is_steady_measures_its_last_window() -> None:
    work = [agent(f"a{index}", (300, 10), (50, 10), (50, 10)) for index in range(40)]
    result = simulate(small(), work, aps=0.3, until_steady=True)
    assert result.end is End.STEADY and result.slo_met and not result.overloaded
    assert BEFORE_S + WINDOW_S <= result.duration_s < LONGEST_S
    count = len(result.samples.ttft_s)
    # 0.3 agents a second of three rounds each and, from the 41st agent on, a synthetic one: 180.
    assert 100 < count < 260
    assert len(result.samples.tpot_s) == len(result.samples.split_s["read"]) == count
    assert min(result.samples.submit_s) > result.duration_s - WINDOW_S - 10
    assert result.jct is not None and result.agents_done > 3 * 0.3 * WINDOW_S


def test_an_overloaded_run_ends_by_the_limit() -> None:
    work = [agent(f"a{index}", (1_000, 10), (1_000, 10)) for index in range(40)]
    result = simulate(small(), work, aps=3.0, until_steady=True)
    assert result.end is End.EXCEEDED and result.overloaded and result.slo_met is False
    assert result.duration_s < BEFORE_S


def test_a_run_whose_agents_cannot_be_served_ends() -> None:
    """All but the synthetic rounds that agents come behind from the second on."""
    result = simulate(small(), [agent("a", (10**9, 1))], aps=1.0, until_steady=True)
    assert result.slo_met is False and result.failed > 0 and result.agents_done == 0
    assert result.duration_s < LONGEST_S


def test_it_is_for_open_online_runs_only() -> None:
    work = [agent("a", (300, 10))]
    with pytest.raises(ValueError, match="until_steady"):
        simulate(small(), work, until_steady=True)
    with pytest.raises(ValueError, match="until_steady"):
        simulate(small(), work, aps=1.0, agents=5, until_steady=True)
