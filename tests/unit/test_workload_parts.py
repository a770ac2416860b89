"""Block ids, copies, latencies and the working set, against hand-worked cases."""

from __future__ import annotations

import random
import statistics
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.workload.agents import TokenAgent, token_agents
from dualpath.workload.blocks import Sharing, encode_blocks, prompt_blocks
from dualpath.workload.latency import parse_latency, with_latency
from dualpath.workload.multiply import multiply
from dualpath.workload.stats import trace_stats
from dualpath.workload.synth import ROWS, regular, synthesise
from dualpath.workload.trace import Round, TraceError, Trajectory, read_trace, write_trace
from dualpath.workload.workingset import Service, working_set

pytestmark = pytest.mark.unit

IDS = st.lists(st.integers(0, 40), max_size=12)


@settings(deadline=None)
@given(st.lists(IDS, min_size=1, max_size=5))
def test_block_ids_survive_their_encoding(prompts: list[list[int]]) -> None:
    rounds = tuple(Round(1, 0, None) for _ in prompts)
    extra = {"block": 64, "blocks": encode_blocks(prompts)}
    assert list(prompt_blocks(Trajectory("a", rounds, extra))) == prompts


@pytest.mark.parametrize(
    "blocks",
    [None, [], [[0, []], [0, []]], [[1, [[0, 1]]]], [[0, [[0, 0]]]], [[0, [[-1, 2]]]], [[0]], [0]],
)
def test_block_ids_that_make_no_sense(blocks: object) -> None:
    trajectory = Trajectory("a", (Round(1, 1, None),), {"block": 64, "blocks": blocks})
    with pytest.raises(TraceError, match="a: blocks"):
        list(prompt_blocks(trajectory))
    sizeless = Trajectory("a", (Round(1, 1, None),), {"blocks": [[0, [[0, 1]]]]})
    with pytest.raises(TraceError, match="a: block: must be a positive integer"):
        Sharing().feed(sizeless)


def shared_pair() -> tuple[Trajectory, Trajectory]:
    """Two agents with 20 tokens (5 blocks of 4) in common, the second of which asks twice."""
    one = Trajectory(
        "one", (Round(22, 2, None),), {"block": 4, "blocks": encode_blocks([[0, 1, 2, 3, 4, 5]])}
    )
    other = Trajectory(
        "other",
        (Round(25, 3, 0.0), Round(4, 1, None)),
        {
            "block": 4,
            "blocks": encode_blocks(
                [[0, 1, 2, 3, 4, 7, 8], [0, 1, 2, 3, 4, 7, 9, 10]],
            ),
        },
    )
    return one, other


def test_hits_on_other_trajectories_by_hand() -> None:
    sharing = Sharing()
    for trajectory in shared_pair():
        sharing.feed(trajectory)
    assert sharing.prompt_tokens == 22 + 25 + 32
    assert sharing.own_tokens == 28
    assert sharing.shared_tokens == sharing.shared_first_tokens == 20
    assert sharing.hit_ratio == 48 / 79
    plain = Sharing()
    plain.feed(Trajectory("p", (Round(10, 2, 0.0), Round(3, 1, None))))
    assert plain.hit_ratio == 12 / 25


def prompt(agent: TokenAgent, index: int) -> list[int]:
    ask = agent.ask(index)
    assert ask is not None
    return list(ask.body["prompt"])


def test_replayed_prompts_share_what_the_trace_says() -> None:
    trajectories = list(shared_pair())
    one, other, again, _ = token_agents(trajectories, 4, seed=7)
    first, second, copied = prompt(one, 0), prompt(other, 0), prompt(again, 0)
    assert (len(first), len(second)) == (22, 25)
    assert first[:20] == second[:20]
    assert first[20:22] != second[20:22]
    assert copied[:20] != first[:20]
    bare = [Trajectory(item.id, item.rounds) for item in trajectories]
    apart = [prompt(agent, 0) for agent in token_agents(bare, 2, seed=7)]
    assert apart[0][:20] != apart[1][:20]


def test_blocks_that_end_early_are_made_up_for() -> None:
    short = Trajectory("s", (Round(30, 1, None),), {"block": 4, "blocks": [[0, [[0, 2]]]]})
    one, other = (prompt(TokenAgent(short, number, seed=1), 0) for number in (0, 1))
    assert len(one) == len(other) == 30
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]


def test_copies_come_behind_a_round_of_their_own() -> None:
    made = list(multiply(lambda: regular(2, 2, 100, 10), 3))
    assert [item.id for item in made] == [
        "regular-0", "regular-1", "regular-0*1", "regular-1*1", "regular-0*2", "regular-1*2",
    ]  # fmt: skip
    assert made[0].rounds == (Round(100, 10, 0.0), Round(100, 10, None))
    assert made[2].rounds == (Round(64, 1, 0.0), *made[0].rounds)
    assert "blocks" not in list(multiply(lambda: shared_pair()[:1], 2))[1].extra
    with pytest.raises(ValueError, match="times"):
        list(multiply(lambda: regular(1, 1, 1, 1), 0))


def test_a_million_trajectories_need_no_more_memory_than_a_thousand(tmp_path: Path) -> None:
    """Nothing between generator and figures keeps what has passed: 100 against 4,000 here."""
    latency = parse_latency("lognormal:11")
    assert latency is not None
    latencies = latency

    def source() -> Iterator[Trajectory]:
        return regular(10, 8, 100, 10)

    peaks = []
    for times in (10, 400):
        path = tmp_path / "work.jsonl"
        tracemalloc.start()
        assert write_trace(path, with_latency(multiply(source, times), latencies, 1)) == 10 * times
        stats = trace_stats(read_trace(path))
        working_set(read_trace(path), Service(1.0, 0.05), 0.5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert stats.trajectories == 10 * times
    assert peaks[1] < 1.3 * peaks[0]


def test_the_generator_keeps_nothing() -> None:
    peaks = []
    for count in (20, 200):
        tracemalloc.start()
        assert sum(1 for _ in synthesise(ROWS["32k"], count)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]  # the longest trajectory seen grows a little with their number


@pytest.mark.parametrize(
    ("text", "mean", "median"),
    [
        ("constant:3", 3.0, 3.0),
        ("lognormal:11:0.5", 11 * 2.718281828 ** (0.125), 11.0),
        ("5", None, 5.0),
        ("exponential:4", 4.0, 4 * 0.693147),
        ("uniform:2:6", 4.0, 4.0),
    ],
)
def test_latency_models(text: str, mean: float | None, median: float) -> None:
    latency = parse_latency(text)
    assert latency is not None
    rng = random.Random(1)
    drawn = [latency.draw(rng) for _ in range(20_000)]
    assert min(drawn) >= 0
    assert statistics.median(drawn) == pytest.approx(median, rel=0.05)
    if mean is not None:
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)


def test_latencies_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [Trajectory("a", (Round(1, 1, 2.0), Round(1, 1, 7.0), Round(1, 1, None)))])
    latency = parse_latency(f"trace:{path}")
    assert latency is not None
    assert {latency.draw(random.Random(n)) for n in range(50)} == {2.0, 7.0}
    write_trace(path, regular(1, 1, 1, 1))
    with pytest.raises(ValueError, match="states no latencies"):
        parse_latency(f"trace:{path}")


@pytest.mark.parametrize(
    "text", ["x", "zipf:1", "constant:", "constant:1:2", "uniform:1", "uniform:3:2", "lognormal:-1",
             "constant:nan", "constant:inf", "trace:absent"],
)  # fmt: skip
def test_latencies_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"latency:|absent"):
        parse_latency(text)


def test_no_latency() -> None:
    assert parse_latency("0") is None
    assert parse_latency("exponential:0") is None


def test_the_working_set_by_hand() -> None:
    work = [Trajectory("a", (Round(100, 11, 5.0), Round(50, 21, None)))]
    found = working_set(work, Service(ttft_s=1.0, tpot_s=0.1), aps=2.0)
    # Round 1: 2 s served with 100 tokens, 5 s waiting with 111; round 2: 3 s with 161.
    assert found.tokens == pytest.approx(2 * (2 * 100 + 5 * 111 + 3 * 161))
    assert found.serving_tokens == pytest.approx(2 * (2 * 100 + 3 * 161))
    assert found.jct_s == pytest.approx(10)
    assert found.agents == pytest.approx(20)
    assert found.tool_share == pytest.approx(0.5)
    assert found.reuse_s == pytest.approx(7)
    assert found.bytes(1000) == pytest.approx(found.tokens * 1000)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="aps"):
            working_set(work, Service(1, 1), wrong)
    with pytest.raises(ValueError, match="no trajectories"):
        working_set([], Service(1, 1), 1)


def test_the_working_set_grows_with_the_tools() -> None:
    plain = list(synthesise(ROWS["32k"], 30))
    sizes = []
    for seconds in (0, 10, 20):
        latency = parse_latency(f"constant:{seconds}")
        assert latency is not None
        sizes.append(working_set(with_latency(plain, latency, 1), Service(1.7, 0.04), 0.4))
    idle, slow, slower = (item.tokens for item in sizes)
    assert slower - slow == pytest.approx(slow - idle)
    assert sizes[0].tool_share == 0
    assert sizes[0].serving_tokens == pytest.approx(sizes[2].serving_tokens)


def test_a_cut_trajectory() -> None:
    trajectory = shared_pair()[1]
    assert trajectory.cut(33) is trajectory
    kept = trajectory.cut(32)
    assert kept is not None
    assert kept.rounds == (Round(25, 3, None),)
    assert len(kept.extra["blocks"]) == 1
    assert trajectory.cut(27) is None
