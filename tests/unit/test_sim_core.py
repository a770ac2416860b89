"""The simulator against schedules worked out by hand, laws it must keep, and its own scheduler."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from sim_kit import TOKEN_BYTES, agent, small

from dualpath.scheduler.decision_log import replay
from dualpath.sim import SimResult, preset, simulate
from dualpath.sim.core import Simulation
from dualpath.sim.load import Scripts
from dualpath.sim.plan import Plan
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Trajectory

pytestmark = pytest.mark.unit

MODES = ("basic", "layerwise", "alternating", "dualpath", "pe-only", "split", "oracle")


def mixed(count: int, seed: int = 1) -> list[Trajectory]:
    """Agents of all shapes: long and short, empty appends and answers, pauses."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        rounds = [(rng.randrange(1, 3000), rng.randrange(0, 60), 0.0)]
        for _ in range(rng.randrange(0, 12)):
            latency = rng.choice((0.0, 0.0, 1.5))
            rounds.append((rng.choice((0, 1, 64, 700)), rng.choice((0, 1, 2, 40)), latency))
        made.append(agent(f"m{index}", *rounds))
    return made


def expected(trajectories: list[Trajectory], block: int) -> tuple[int, int, int, int]:
    """Requests, tokens in, tokens out, hit tokens, from the definition."""
    requests = tokens_in = tokens_out = hits = 0
    for trajectory in trajectories:
        context = stored = 0
        for item in trajectory.rounds:
            prompt = context + item.append_tokens
            hits += min(stored, prompt - 1) // block * block
            context = prompt + item.gen_tokens
            stored = context - (1 if item.gen_tokens else 0)
            requests += 1
            tokens_in += prompt
            tokens_out += item.gen_tokens
    return requests, tokens_in, tokens_out, hits


# ---- by hand -----------------------------------------------------------------------------------


def test_one_round_by_hand() -> None:
    """Fetches at k * 0.1 s (PE) and 0.05 + k * 0.1 s (DE); nothing to read; 200 tokens compute
    for 0.2 s while their KV goes out in 0.2 ms, a tenth of which (one of ten layers) is not hidden;
    H2D 0.2 ms; two steps of 10 ms for tokens 2 and 3."""
    result = simulate(small(), [agent("a", (200, 3))])
    assigned_s = 0.1  # the PE's fetch comes second
    prefilled_s = assigned_s + 0.2 + 0.0002 / 10
    joined_s = prefilled_s + 0.0002
    (ttft,), (ttst,), (tpot,) = result.samples.ttft_s, result.samples.ttst_s, result.samples.tpot_s
    assert ttft == pytest.approx(prefilled_s)
    assert ttst == pytest.approx(joined_s + 0.01 - prefilled_s)
    assert tpot == pytest.approx(0.01)
    assert result.duration_s == pytest.approx(joined_s + 0.02)


@pytest.mark.parametrize(
    ("mode", "moving_s"),
    [
        # 640 hit tokens in (and out of this node's memory, at the same time), then 0.061 s of
        # computation, then hit and new tokens out: one after the other.
        ("basic", 0.00064 + 0.061 + 0.000701),
        # At once: loads and exports both leave this node's memory, so 640 + 701 tokens go out.
        ("pe-only", 0.061 + 0.001341 / 10),
        # From the DE: 640 tokens come in, only the 61 new ones go out.
        ("dualpath", 0.061 + 0.001341 / 10),
        ("oracle", 0.061),
    ],
)
def test_second_round_by_hand(mode: str, moving_s: float) -> None:
    """The first round leaves 641 tokens of which 640 are stored; the second adds 60."""
    result = simulate(small(mode), [agent("a", (600, 42), (59, 1))])
    assert result.hit_tokens == 640
    read_s = 0.0 if mode == "oracle" else 640 / 100_000
    parts = {name: values[1] for name, values in result.samples.split_s.items()}
    assert parts["read"] == pytest.approx(read_s)
    assert parts["prefill"] == pytest.approx(moving_s)
    assert result.samples.ttft_s[1] == pytest.approx(sum(parts.values()))


def test_latency_and_durability_delay_the_next_round() -> None:
    result = simulate(small(), [agent("a", (63, 66, 2.0), (1, 1))])
    first, second = result.samples.submit_s
    answered = first + result.samples.ttft_s[0] + result.samples.ttst_s[0]
    answered += 64 * result.samples.tpot_s[0]
    # 128 tokens have KV: two blocks; the 63 of the prompt are none, so both are written at the end.
    assert second == pytest.approx(answered + 2 * 64 / 100_000 + 2.0)
    assert result.snic_written == {"de0": 128 * TOKEN_BYTES}


def test_decode_clock_slows_down_with_the_fullest_engine() -> None:
    """Two requests on one DE whose steps take 10 ms + 10 ms a request."""
    spec = small(engine={"decode_step_per_request_s": 0.01})
    alone = simulate(spec, [agent("a", (64, 102))])
    both = simulate(spec, [agent("a", (64, 102)), agent("b", (64, 102))])
    assert alone.tpot is not None and both.tpot is not None
    assert alone.tpot.mean == pytest.approx(0.02)
    # They join and leave at nearly the same time: almost every step has both.
    assert both.tpot.mean == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize(("requests", "step_s"), [(1, 0.02), (2, 0.03), (4, 0.034)])
def test_from_the_knee_on_a_request_adds_less(requests: int, step_s: float) -> None:
    """10 ms, 10 ms each for two requests and 2 ms for each further one."""
    engine = {
        "decode_step_per_request_s": 0.01, "decode_knee_requests": 2,
        "decode_step_per_further_request_s": 0.002,
    }  # fmt: skip
    spec = small(engine=engine)
    assert spec.engine.decode_step_s + spec.engine.decode_added_s(requests) == pytest.approx(step_s)
    result = simulate(spec, [agent(f"a{i}", (64, 1002)) for i in range(requests)])
    assert result.tpot is not None
    # They join and leave at nearly the same time: almost every step has all of them.
    assert result.tpot.mean == pytest.approx(step_s, rel=0.02)


def test_what_is_stored_before_the_run_is_hit_by_the_first_round() -> None:
    """In whole blocks, and not by an agent that comes again, which has other tokens."""
    told = replace(agent("a", (1000, 1)), extra={"stored_tokens": 650})
    for agents, hits in ((1, 640), (2, 640 + 64)):  # of the copy only its own first block
        result = simulate(small(), [told], agents=agents)
        assert result.hit_tokens == hits
        assert sum(result.snic.values()) == hits * TOKEN_BYTES
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(ValueError, match="a: stored_tokens must be 0 or more"):
            simulate(small(), [replace(told, extra={"stored_tokens": wrong})])


def test_tokens_cut_a_batch_where_no_quota_does() -> None:
    """900 tokens, at most 400 a step: three steps. With the quota time alone cuts, unless told."""
    pair = {"prefill_nodes": 2, "prefill_lockstep": 2}
    for mode, limits, steps in (
        ("alternating", {"max_step_tokens": 400}, 3),
        ("dualpath", {"max_step_tokens": 400, "quota_s": 10.0}, 1),
        ("dualpath", {"quota_step_tokens": 400, "quota_s": 10.0}, 3),
    ):
        result = simulate(small(mode, spec=limits, **pair), [agent("a", (900, 1))])
        assert len(result.steps.start_s) == steps


@pytest.mark.parametrize("own", [0.0, 0.25, 1.0])
def test_a_group_decodes_at_its_fullest_engine_by_what_is_its_own(own: float) -> None:
    """One request on two DEs that step together: the fullest has one, the mean one half."""
    engine = {"decode_step_per_request_s": 0.01, "attention_share": own}
    spec = small(decode_nodes=2, decode_lockstep=2, engine=engine)
    result = simulate(spec, [agent("a", (64, 102))])
    assert result.tpot is not None
    assert result.tpot.mean == pytest.approx(0.01 + 0.01 * (own + (1 - own) / 2))


def test_quota_cuts_a_batch() -> None:
    """Attention is all there is, 1 ms a token: 300 ms are 300 tokens, so 900 take three steps; what
    earlier chunks left in the PE's buffer comes again for each: 300 and 600 tokens."""
    pair = {"prefill_nodes": 2, "prefill_lockstep": 2}  # only groups keep their steps
    lengths = {}
    for mode in ("dualpath", "alternating"):
        steps = simulate(small(mode, **pair), [agent("a", (900, 1))]).steps
        lengths[mode] = [end - at for at, end in zip(steps.start_s, steps.end_s, strict=True)]
    assert lengths["alternating"] == [pytest.approx(0.9 + 0.0009 / 10)]
    assert lengths["dualpath"] == [pytest.approx(0.3 + n / 10 * 1e-3) for n in (0.3, 0.6, 0.9)]


def test_lockstep_waits_for_the_slowest() -> None:
    """Two PEs of which one computes half as fast: their steps end with the slow one's."""
    spec = small(prefill_nodes=2, prefill_lockstep=2, compute_scale={"pe1": 0.5})
    result = simulate(spec, [agent("a", (100, 1)), agent("b", (100, 1))])
    assert max(result.samples.split_s["prefill"]) == pytest.approx(0.2, rel=0.01)
    assert min(result.samples.split_s["prefill"]) == pytest.approx(0.2, rel=0.01)
    assert result.steps.max_over_mean() == pytest.approx(0.2 / 0.15)


# ---- laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_conservation(mode: str) -> None:
    trajectories = mixed(40)
    spec = small(
        mode, prefill_nodes=2, decode_nodes=3, gpus_per_node=2, prefill_lockstep=4,
        decode_lockstep=2, pe_buffer_bytes=8e6, de_buffer_bytes=20e6, pe_hbm_bytes=12e6,
        de_hbm_bytes=30e6,
    )  # fmt: skip
    simulation = Simulation(
        spec, Scripts(trajectories), Plan(None, None, 0, 0.0, 1.0), 1.0, None, None, None
    )
    result = simulation.run()
    figures = (result.requests, result.tokens_in, result.tokens_out, result.hit_tokens)
    assert figures == expected(trajectories, spec.block_tokens)
    assert result.failed == 0 and result.agents_done == len(trajectories)
    assert result.computed_tokens == result.tokens_in - result.hit_tokens
    hit_bytes = result.hit_tokens * TOKEN_BYTES
    read = 0.0 if mode == "oracle" else hit_bytes
    assert sum(result.snic.values()) == pytest.approx(read)
    assert result.path["pe"] + result.path["de"] == pytest.approx(hit_bytes)
    for node in simulation.cluster.nodes:
        assert sum(node.window) == pytest.approx(node.read_bytes)
        buffer = node.buffer
        buffer.settle(math.inf)
        assert buffer.free == pytest.approx(buffer.capacity) and not buffer.waiting
        assert buffer.peak <= buffer.capacity
    peaks = [engine.hbm_peak_bytes for engine in simulation.cluster.decode.values()]
    assert 0 < max(peaks) <= spec.cluster.de_hbm_bytes
    assert all(engine.hbm_bytes == 0 for engine in simulation.cluster.decode.values())
    assert simulation.scheduler.idle
    simulation.scheduler.check_integrity()


def stored_blocks(trajectories: list[Trajectory], block: int) -> int:
    """Blocks that agents have when they are over."""
    total = 0
    for trajectory in trajectories:
        last = trajectory.rounds[-1].gen_tokens
        total += (trajectory.total_tokens - (1 if last else 0)) // block
    return total


def test_everything_is_persisted_once() -> None:
    trajectories = [one for one in mixed(30) if all(r.gen_tokens for r in one.rounds)]
    trajectories += [agent("long", (500, 300), (5, 200), (64, 1), (1, 90))]
    result = simulate(small(), trajectories)
    blocks = stored_blocks(trajectories, 64)
    # A prompt recomputes what a block misses at its end, and never a stored block.
    assert sum(result.snic_written.values()) == blocks * 64 * TOKEN_BYTES


def test_infinite_nics_are_the_oracle() -> None:
    trajectories = mixed(60, seed=3)
    endless = dict.fromkeys(("snic_bytes_per_s", "cnic_bytes_per_s"), math.inf)
    fast = simulate(small(**endless, pe_buffer_bytes=1e12, de_buffer_bytes=1e12), trajectories)
    oracle = simulate(small("oracle"), trajectories)
    assert fast.duration_s == pytest.approx(oracle.duration_s, rel=0.01)
    assert fast.jct is not None and oracle.jct is not None
    assert fast.jct.mean == pytest.approx(oracle.jct.mean, rel=0.01)


def storage_bound(mode: str, **cluster: float) -> SimResult:
    """No computation worth mentioning: 20 agents read some 5,000 tokens 160 times each, behind a
    short start (what is to be read must be written first, by one node)."""
    rounds = [(640, 1), (4416, 1), *[(1, 1)] * 160]
    spec = small(
        mode, engine={"flops_per_s": 1e18, "decode_step_s": 1e-6}, cnic_bytes_per_s=1e13,
        spec={"fetch_interval_s": 0.001}, **cluster,
    )  # fmt: skip
    return simulate(spec, [agent(f"a{index}", *rounds) for index in range(20)])


def test_without_computation_storage_decides() -> None:
    """To 1 %: the time is that of the bytes over the SNICs that may read."""
    one, two = storage_bound("pe-only"), storage_bound("dualpath")
    size = sum(one.snic.values())
    assert one.duration_s == pytest.approx(size / 1e8, rel=0.01)
    assert two.duration_s == pytest.approx(size / 2e8, rel=0.01)


def test_uneven_nics_are_used_by_what_they_can() -> None:
    scale = {"de0": 3.0}
    even = storage_bound("dualpath")
    uneven = storage_bound("split", snic_scale=scale)  # type: ignore[arg-type]
    assert uneven.snic["de0"] / uneven.snic["pe0"] == pytest.approx(3.0, rel=0.1)
    assert uneven.duration_s == pytest.approx(even.duration_s / 2, rel=0.05)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_snic_is_an_m_d_1_queue(load: float) -> None:
    """Agents with one read each, Poisson: the mean wait is rho * s / (2 * (1 - rho))."""
    service_s = 0.5
    tokens = int(service_s * 100_000) // 64 * 64
    spec = small(
        "pe-only", engine={"flops_per_s": 1e18, "decode_step_s": 1e-6}, cnic_bytes_per_s=1e13,
        pe_buffer_bytes=1e12, de_buffer_bytes=1e12, pe_hbm_bytes=1e12, de_hbm_bytes=1e12,
        spec={"fetch_interval_s": 1e-4, "alpha_tokens": 10**12, "beta_tokens": 10**12},
    )  # fmt: skip
    # The first round only stores what the second reads. Its write-back spaces agents out evenly;
    # pauses of any length up to 200 s make them come at random again.
    rng = random.Random(9)
    agents = [agent(f"a{index}", (tokens, 1, rng.uniform(0, 200)), (1, 1)) for index in range(5000)]
    result = simulate(spec, agents, agents=5000, aps=load / service_s, seed=5)
    samples = result.samples
    waits = [
        value - tokens / 100_000
        for at, value in zip(samples.submit_s, samples.split_s["read"], strict=True)
        if value > 0 and 300 < at < result.duration_s - 300
    ]
    assert len(waits) > 3500
    wait_s = sum(waits) / len(waits)
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.12)


# ---- same again ----------------------------------------------------------------------------------


def test_same_seed_same_result() -> None:
    def run(seed: int) -> dict[str, object]:
        figures = simulate(small(), mixed(20), aps=2.0, agents=30, seed=seed).to_json()
        for name in ("wall_s", "scheduler_cpu_s", "scheduler_cores"):
            del figures[name]
        return figures

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("mode", ["basic", "dualpath", "split"])
def test_decisions_replay(mode: str) -> None:
    """The log of a simulation replays on a fresh scheduler, as a front's does."""
    lines: list[str] = []
    spec = small(mode, prefill_nodes=2, decode_nodes=2, gpus_per_node=2)
    result = simulate(spec, mixed(20), decision_log=lines.append)
    decisions = replay(lines)
    assert sum(len(one.assigned) for one in decisions) == result.requests > 50


def test_time_does_not_go_back() -> None:
    lines: list[str] = []
    simulate(small(), mixed(10), decision_log=lines.append)
    times = [float(line.split('"now_s":')[1].split(",")[0]) for line in lines if '"now_s"' in line]
    assert len(times) > 50 and all(a <= b for a, b in pairwise(times))


def test_a_steady_run_measures_its_window_and_gives_up_when_it_cannot_keep_up() -> None:
    trajectories = [agent("a", (500, 5), (100, 5), (100, 5))]
    spec = small(gpus_per_node=1)
    calm = simulate(spec, trajectories, aps=0.3, warmup_s=50, measure_s=200)
    assert calm.slo_met and not calm.overloaded
    assert all(50 <= at < 250 for at in calm.samples.submit_s)
    assert len(calm.samples.submit_s) == pytest.approx(0.3 * 3 * 200, rel=0.3)
    busy = simulate(spec, trajectories, aps=3.0, warmup_s=50, measure_s=2000)
    assert busy.overloaded and busy.slo_met is False
    assert busy.duration_s < 2050


@pytest.mark.full
def test_paper_cluster_orders_its_modes() -> None:
    """Each step of the ablation helps, and nothing beats the oracle (660B, 1P2D, short rows)."""
    trajectories = list(synthesise(ROWS["32k"], 40))
    spec = preset("ds-660b-1p2d")
    jct = {}
    for mode in ("basic", "layerwise", "alternating", "dualpath", "oracle"):
        result = simulate(spec.with_mode(mode), trajectories, agents=150)
        assert result.jct is not None
        jct[mode] = result.jct.mean
    assert jct["basic"] > jct["layerwise"] > jct["alternating"] > jct["dualpath"] > jct["oracle"]
