"""Failed nodes, stragglers, the comparator's pool, shared prefixes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from sim_kit import TOKEN_BYTES, agent, small

from dualpath.sim import preset, simulate
from dualpath.sim.core import Simulation
from dualpath.sim.load import Plan, Scripts
from dualpath.sim.spec import SimSpec
from dualpath.workload.blocks import encode_blocks
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Trajectory, read_trace

pytestmark = pytest.mark.unit


def simulation(spec: SimSpec, trajectories: list[Trajectory]) -> Simulation:
    plan = Plan(None, None, 0, 0.0, 1.0)
    return Simulation(spec, Scripts(trajectories), plan, 1.0, None, None, None)


def busy(count: int) -> list[Trajectory]:
    rng = random.Random(4)
    return [
        agent(f"b{i}", *[(rng.randrange(64, 900), rng.choice((1, 30, 90))) for _ in range(8)])
        for i in range(count)
    ]


@pytest.mark.parametrize("node", ["pe0", "de0"])
@pytest.mark.parametrize("mode", ["basic", "dualpath", "split", "oracle"])
def test_a_node_dies_and_nothing_is_lost(mode: str, node: str) -> None:
    """Every round is answered once, whatever stage it was in, and nothing stays occupied."""
    trajectories = busy(30)
    requests = sum(len(one.rounds) for one in trajectories)
    for at_s in (0.3, 2.0, 5.03, 9.7):
        spec = small(
            mode, prefill_nodes=2, decode_nodes=2, gpus_per_node=2, prefill_lockstep=4,
            decode_lockstep=4, failures=((node, at_s),), pe_buffer_bytes=6e6, de_buffer_bytes=9e6,
        )  # fmt: skip
        sim = simulation(spec, trajectories)
        result = sim.run()
        assert (result.requests, result.failed) == (requests, 0)
        assert result.agents_done == len(trajectories)
        sim.scheduler.check_integrity()
        assert sim.scheduler.idle
        for one in sim.cluster.nodes:
            if one.alive:
                one.buffer.settle(float("inf"))
                assert one.buffer.free == pytest.approx(one.buffer.capacity)
        healthy = [engine for engine in sim.cluster.decode.values() if engine.node.alive]
        assert len(healthy) == (2 if node == "de0" else 4)
        assert all(engine.hbm_bytes == engine.seqs == 0 for engine in healthy)


@pytest.mark.parametrize("node", ["pe0", "de0"])
def test_without_any_engine_of_a_kind_what_is_left_fails(node: str) -> None:
    trajectories = busy(10)
    result = simulate(small(failures=((node, 3.0),)), trajectories)
    assert result.failed + result.agents_done == 10 and result.failed > 0


def test_a_failure_costs_time() -> None:
    trajectories = busy(30)
    pair = {"prefill_nodes": 2, "decode_nodes": 2}
    calm = simulate(small(**pair), trajectories)
    hurt = simulate(small(**pair, failures=(("pe1", 1.0),)), trajectories)
    assert hurt.duration_s > 1.3 * calm.duration_s
    assert hurt.tokens_out == calm.tokens_out


def test_a_straggler_slows_its_group() -> None:
    trajectories = list(synthesise(ROWS["32k"], 20))
    spec = preset("ds-27b-1p2d")
    slow = replace(spec, cluster=replace(spec.cluster, compute_scale={"de0": 0.5}))
    even, uneven = simulate(spec, trajectories), simulate(slow, trajectories)
    assert even.tpot is not None and uneven.tpot is not None
    assert even.tpot.mean < uneven.tpot.mean < 2 * even.tpot.mean
    assert uneven.tpot.p99 == pytest.approx(2 * even.tpot.p99, rel=0.2)


# ---- the comparator --------------------------------------------------------------------------


def with_pool(pool_bytes: float) -> SimSpec:
    spec = small("comparator", prefill_nodes=2, decode_nodes=2, gpus_per_node=2)
    return replace(spec, features=replace(spec.features, pool_bytes_per_node=pool_bytes))


def test_a_pool_saves_what_it_holds() -> None:
    trajectories = busy(30)
    read = []
    for pool_bytes in (1.0, 3e6, 12e6, 1e12):
        sim = simulation(with_pool(pool_bytes), trajectories)
        result = sim.run()
        assert sim.pools is not None
        sim.pools.check_integrity()
        read.append(sum(result.snic.values()))
        stored = result.hit_tokens - result.pool_hit_tokens
        assert read[-1] == pytest.approx(stored * TOKEN_BYTES)
        assert result.path["de"] == 0
    assert read[0] > read[1] > read[2] > read[3]
    assert read[0] == pytest.approx(result.hit_tokens * TOKEN_BYTES)
    # The biggest pool loses only what balance sends to another node.
    assert read[3] < 0.5 * read[0]


# ---- shared prefixes -------------------------------------------------------------------------


def sharing(name: str, prompts: list[list[int]], block: int, gen: int = 10) -> Trajectory:
    """An agent whose prompts fill the given blocks exactly."""
    rounds, context = [], 0
    for ids in prompts:
        append = len(ids) * block - context
        rounds.append((append, gen))
        context += append + gen
    made = agent(name, *rounds)
    return replace(made, extra={"block": block, "blocks": encode_blocks(prompts)})


def test_what_others_stored_is_hit() -> None:
    """Two prompts begin with blocks 1 and 2. Apart in time, the second hits both; started at the
    same moment, nothing is there to hit. Block 4 follows another block than in the first prompt."""
    one = sharing("a", [[1, 2, 3], [1, 2, 3, 9, 10]], 128)
    other = sharing("b", [[1, 2, 7, 4]], 128)
    own = simulate(small(), [one]).hit_tokens
    assert own == (3 * 128 + 9) // 64 * 64
    assert simulate(small(), [one, other], agents=2).hit_tokens == own
    apart = simulate(small(), [one, other], agents=2, aps=0.01, seed=1)
    # Whoever comes first, the other's first prompt hits two blocks.
    assert apart.hit_tokens == own + 2 * 128
    # Copies begin with a block of their own.
    assert simulate(small(), [one], agents=2, aps=0.01).hit_tokens == 2 * own + 2 * 64


def test_a_public_trace_with_shared_blocks() -> None:
    path = Path(__file__).parents[2] / "../shared/traces/mooncake_conversation.jsonl.gz"
    if not path.exists():
        pytest.skip("the public traces are not here")
    trajectories = list(islice(read_trace(path), 60))
    alone = [replace(one, extra={}) for one in trajectories]
    shared = simulate(preset("ds-27b-1p1d"), trajectories, aps=0.5, agents=60)
    without = simulate(preset("ds-27b-1p1d"), alone, aps=0.5, agents=60)
    assert shared.requests == without.requests and shared.failed == 0
    assert shared.hit_tokens > without.hit_tokens
