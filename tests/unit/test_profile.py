"""What a profile says about thresholds, and what is refused as one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.scheduler.attention_time import AttentionTimeModel, Residual
from dualpath.scheduler.profile import Profile, ProfileError, decode_profile, encode_profile

pytestmark = pytest.mark.unit

ATTENTION = AttentionTimeModel(
    1e-3, 2e-6, 3e-7, 4e-10, 5e-10, 0.04, (Residual(64, 32, 0.002, 0.0021),), "m", "h"
)


def profile(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "model": "m", "hardware": "h", "token_bytes": 1000,
        "snic_read_bytes_s": {"p": 5e6, "d": 2e6}, "miss_tokens_per_s": 300.0, "hit_ratio": 0.9,
        "attention": ATTENTION,
    }  # fmt: skip
    return Profile(**(values | changes))


def test_alpha_is_three_seconds_of_the_slowest_snic() -> None:
    assert profile().alpha_tokens == 6000  # 2 MB/s * 3 s / 1 kB
    assert profile(token_bytes=7).alpha_tokens == 857_142  # rounded down
    assert profile(token_bytes=10**9).alpha_tokens == 1  # a threshold of nothing would stop all


def test_beta_counts_hit_tokens_too() -> None:
    assert profile(hit_ratio=0.0).beta_tokens == 1500  # 5 s * 300 tokens/s
    assert profile(hit_ratio=0.75).beta_tokens == 6000
    assert profile(miss_tokens_per_s=0.01, hit_ratio=0.0).beta_tokens == 1


@given(st.floats(1.0, 1e12), st.integers(1, 10**6), st.floats(0.01, 1e6), st.floats(0.0, 0.999))
def test_read_back_as_written(rate: float, size: int, miss: float, hit: float) -> None:
    made = profile(
        snic_read_bytes_s={"n": rate}, token_bytes=size, miss_tokens_per_s=miss, hit_ratio=hit
    )
    again = decode_profile(encode_profile(made))
    assert again == made
    assert (again.alpha_tokens, again.beta_tokens) == (made.alpha_tokens, made.beta_tokens)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_bytes": 0}, "token_bytes"),
        ({"snic_read_bytes_s": {}}, "snic_read_bytes_s"),
        ({"snic_read_bytes_s": {"p": 1.0, "d": 0.0}}, "every rate"),
        ({"miss_tokens_per_s": 0.0}, "every rate"),
        ({"hit_ratio": 1.0}, "hit_ratio must be in 0 .. 1, got 1.0"),
        ({"hit_ratio": -0.1}, "hit_ratio"),
    ],
)
def test_figures_out_of_range(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ProfileError, match=text):
        profile(**changes)
    values = msgspec.to_builtins(profile()) | changes
    with pytest.raises(ProfileError, match=f"not a profile: .*{text}"):
        decode_profile(json.dumps(values).encode())


def test_what_is_no_profile_is_refused_in_one_line() -> None:
    values = msgspec.to_builtins(profile())
    del values["attention"]
    for raw, text in (
        (b"{", "not a profile"),
        (json.dumps(values).encode(), "attention"),
        (json.dumps(msgspec.to_builtins(profile()) | {"more": 1}).encode(), "more"),
    ):
        with pytest.raises(ProfileError, match=text) as caught:
            decode_profile(raw)
        assert "\n" not in str(caught.value)
