"""The compute-quota batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.scheduler.attention_time import AttentionTimeModel
from dualpath.scheduler.batch import cut_batch, share_of_long

pytestmark = pytest.mark.unit

pairs = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), max_size=12)
# Binary fractions, so that sums are exact and the quota can be compared without a tolerance.
UNITS_S = (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-18, 2.0**-18)
costs = st.tuples(*(st.integers(0, 8).map(lambda n, u=unit: n * u) for unit in UNITS_S)).map(
    lambda values: AttentionTimeModel(*values)
)
quotas = st.integers(0, 2000).map(lambda n: n / 64)


@given(pairs, quotas, costs, st.none() | st.integers(1, 4000))
def test_batch_properties(
    pending: list[tuple[int, int]],
    quota_s: float,
    cost: AttentionTimeModel,
    max_tokens: int | None,
) -> None:
    counts = cut_batch(pending, quota_s, cost, max_tokens)
    taken = [(cached, count) for (cached, _), count in zip(pending, counts, strict=True)]
    total = sum(counts)
    assert all(0 <= n <= bsz for n, (_, bsz) in zip(counts, pending, strict=True))
    assert total <= (max_tokens or total)
    # Within the quota, or a single token that progress demands.
    assert cost.batch_s(taken) <= quota_s or total <= 1
    # Something always progresses.
    assert total >= 1 or not pending
    # FIFO: whole requests, then at most one cut one, then nothing.
    cut = next((i for i, (_, bsz) in enumerate(pending) if counts[i] < bsz), len(pending))
    assert not any(counts[cut + 1 :])
    # As many as possible: one token more for the cut request breaks a limit.
    if cut < len(pending):
        more = [*taken[:cut], (pending[cut][0], counts[cut] + 1)]
        assert cost.batch_s(more) > quota_s or total == max_tokens


def test_worked_example() -> None:
    # 1 s fixed, 1/128 s a token: 2.5625 s leave 200: all 120 of the first, 80 of the second.
    cost = AttentionTimeModel(1.0, 1 / 128, 0.0, 0.0, 0.0)
    assert cut_batch([(0, 120), (0, 100), (0, 5)], 2.5625, cost) == [120, 80, 0]
    assert cut_batch([(0, 120), (0, 100), (0, 5)], 2.5625, cost, max_tokens=130) == [120, 10, 0]
    # The quota is smaller than the fixed part: one token all the same.
    assert cut_batch([(0, 120), (0, 100)], 0.5, cost) == [1, 0]
    assert cut_batch([], 3.0, cost) == []


def test_cached_tokens_make_a_chunk_smaller() -> None:
    cost = AttentionTimeModel(0.0, 0.0, 0.0, 2.0**-20, 0.0)
    assert cut_batch([(1024, 500)], 0.125, cost) == [128]
    assert cut_batch([(2048, 500)], 0.125, cost) == [64]


def test_impossible_arguments_are_refused() -> None:
    cost = AttentionTimeModel(0.0, 1.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="request 1"):
        cut_batch([(0, 1), (0, 0)], 9.0, cost)
    with pytest.raises(ValueError, match="max_tokens"):
        cut_batch([(0, 1)], 9.0, cost, max_tokens=0)


@given(st.lists(st.integers(1, 3000), max_size=12), st.integers(1, 4000))
def test_long_prompts_leave_a_part_to_short_ones(left: list[int], budget: int) -> None:
    share = share_of_long(left, budget)
    long = sum(tokens >= budget for tokens in left)
    if 0 < long < len(left) and budget > long:
        # Each long one goes on, and what they all take together is not the whole step.
        assert 1 <= share <= budget
        assert long * share < budget
        # As much as is fair: one part each, and one for all short ones.
        assert (long + 1) * (share + 1) > budget
    elif not 0 < long < len(left):
        assert share == 0


def test_shares_of_a_step() -> None:
    assert share_of_long([4000, 70], 256) == 128
    assert share_of_long([70, 4000, 4000], 256) == 85
    assert share_of_long([70, 180], 256) == 0  # first in, first out
    assert share_of_long([4000, 4000], 256) == 0  # nobody short waits
    assert share_of_long([], 256) == 0
