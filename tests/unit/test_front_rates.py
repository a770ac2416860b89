"""Rates over a window, spreads, and the pace of an answer's tokens."""

from __future__ import annotations

import time

import pytest

from dualpath.serve.rates import RateWindow, difference_ratio, max_over_mean
from dualpath.serve.tempo import Tempo

pytestmark = pytest.mark.unit


def test_rates_over_the_window() -> None:
    window = RateWindow(10.0)
    assert window.per_second() == {}
    window.add(0.0, {"a": 1000.0, "b": 0.0})
    assert window.per_second() == {"a": 0.0, "b": 0.0}, "what was before is not growth"
    for second in range(1, 31):
        window.add(float(second), {"a": 1000.0 + 5 * second, "b": 0.0 if second < 25 else 60.0})
    assert window.per_second() == {"a": 5.0, "b": 6.0}
    window.add(40.0, {"a": 1150.0, "b": 60.0})
    assert window.per_second() == {"a": 0.0, "b": 0.0}


def test_a_total_that_starts_anew_counts_from_zero() -> None:
    window = RateWindow(10.0)
    for second, total in ((0.0, 500.0), (1.0, 600.0), (2.0, 30.0), (3.0, 50.0)):
        window.add(second, {"a": total})
    assert window.per_second()["a"] == pytest.approx((100 + 30 + 20) / 3)


def test_a_total_that_comes_and_goes() -> None:
    window = RateWindow(10.0)
    window.add(0.0, {"a": 0.0})
    window.add(2.0, {"a": 8.0, "b": 100.0})
    assert window.per_second() == {"a": 4.0, "b": 0.0}
    window.add(4.0, {"b": 110.0})
    assert window.per_second() == {"b": 5.0}


def test_spreads() -> None:
    assert difference_ratio({"a": 100.0, "b": 80.0}) == pytest.approx(0.2)
    assert difference_ratio({"a": 0.0, "b": 0.0}) == difference_ratio({}) == 0.0
    assert max_over_mean({"a": 6.0, "b": 5.0}) == pytest.approx(12 / 11)
    assert max_over_mean({"a": 0.0}) == max_over_mean({}) == 1.0


def chat(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_tempo_counts_chunks_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 13.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    tempo = Tempo()
    for event in (
        chat(role="assistant", content=""),
        chat(content="a"),
        chat(tool_calls=[{"index": 0}]),
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ):
        tempo.event(event)
    assert (tempo.first_s, tempo.second_gap_s, tempo.chunks) == (10.0, 1.0, 3)
    assert tempo.per_token_s == pytest.approx(3.0 / 2)
    tempo.tokens = 7  # the engine says how many tokens the three chunks held
    assert tempo.per_token_s == pytest.approx(3.0 / 6)


def test_one_token_has_no_pace() -> None:
    tempo = Tempo()
    assert tempo.second_gap_s is tempo.per_token_s is None
    tempo.token()
    tempo.tokens = 1
    assert tempo.second_gap_s is tempo.per_token_s is None
