"""The NIC's virtual clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.transfer.pacer import SLACK_S, Pacer

pytestmark = pytest.mark.unit


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 0.1)), min_size=1, max_size=50),
)
def test_never_faster_than_the_rate(rate: float, grants: list[tuple[int, float]]) -> None:
    pacer, now, moved = Pacer(rate), 100.0, 0
    for nbytes, idle_s in grants:
        now += pacer.wait_s(now) + idle_s
        # What went before this grant was paid for, but for the slack.
        assert moved <= rate * (now - 100.0 + SLACK_S) * (1 + 1e-9) + 1
        pacer.take(nbytes, now)
        moved += nbytes


@given(st.floats(1e3, 1e9), st.lists(st.integers(1, 10**6), min_size=2, max_size=50))
def test_a_waker_that_is_a_little_late_loses_nothing(rate: float, sizes: list[int]) -> None:
    pacer, now = Pacer(rate), 0.0
    for nbytes in sizes:
        if (wait_s := pacer.wait_s(now)) > 0:
            now += wait_s + SLACK_S / 2
        pacer.take(nbytes, now)
    assert now <= sum(sizes[:-1]) / rate + SLACK_S * 1.5


def test_unlimited_never_waits() -> None:
    pacer = Pacer()
    pacer.take(1 << 60, 1.0)
    assert pacer.wait_s(1.0) == 0 and not pacer.limited
    for rate in (0, -1.0, math.nan):
        with pytest.raises(ValueError):
            Pacer(rate)
