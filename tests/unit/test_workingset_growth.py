"""How the KV of live agents grows with their tools' latency, in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sim_kit import agent, small

from dualpath.sim import MODES, SimResult, simulate

pytestmark = pytest.mark.unit

ROUNDS, SERVICE_S = 8, 0.5


def run(ratio: float, aps: float, pool_bytes: float = 0.0) -> SimResult:
    """Tools take ``ratio`` times about a round's service."""
    spec = small("comparator" if pool_bytes else "dualpath")
    if pool_bytes:
        features = replace(MODES["comparator"], pool_bytes_per_node=pool_bytes)
        spec = replace(spec, features=features)
    life_s = ROUNDS * SERVICE_S * (1 + ratio)
    work = [agent("a", *[(200, 20, ratio * SERVICE_S)] * ROUNDS)]
    return simulate(spec, work, aps=aps, warmup_s=2 * life_s, measure_s=max(10 * life_s, 400.0))


def test_linear_at_a_fixed_rate_and_square_when_the_rate_grows_with_it() -> None:
    calm, slow = run(3.0, 0.05), run(12.0, 0.05)
    fixed = math.log(slow.working_set_bytes / calm.working_set_bytes) / math.log(4)
    both = math.log(run(12.0, 0.2).working_set_bytes / calm.working_set_bytes) / math.log(4)
    assert 0.6 < fixed < 1.3
    assert 1.6 < both < 2.3


def test_a_dram_tier_of_fixed_size_hits_less() -> None:
    hits = []
    for ratio in (0.0, 3.0, 12.0):
        result = run(ratio, 0.2, pool_bytes=3e6)
        hits.append(result.pool_hit_tokens / result.hit_tokens)
    assert hits[0] > hits[1] > hits[2]
