"""The generator against Table 2, and the statistics against hand-worked traces."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from dualpath.workload.stats import Reading, trace_stats
from dualpath.workload.synth import ROWS, Row, regular, synthesise, with_tool_latency
from dualpath.workload.trace import Round, Trajectory, read_trace

pytestmark = pytest.mark.unit

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_frozen_trajectories_meet_table_2(row: Row) -> None:
    stats = trace_stats(synthesise(row))
    assert stats.trajectories == 500
    ours = (stats.turns, stats.macro.append, stats.macro.gen, stats.total, stats.macro.context)
    assert ours == pytest.approx(row.paper, rel=0.015)


def test_the_request_reading_is_the_smaller_one() -> None:
    stats = trace_stats(synthesise(ROWS["64k"]))
    assert stats.request.append == pytest.approx(200, rel=0.1)
    assert stats.hit_ratio > 0.98


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_limits_of_a_row_hold_for_every_trajectory(row: Row) -> None:
    for trajectory in synthesise(row, 100, seed=11):
        assert trajectory.total_tokens <= row.max_tokens
        assert all(1 <= item.append_tokens <= 0.4 * row.max_tokens for item in trajectory.rounds)
        assert all(item.gen_tokens >= 1 for item in trajectory.rounds)
        assert all(item.tool_latency_s == 0 for item in trajectory.rounds[:-1])
        assert trajectory.rounds[-1].tool_latency_s is None


def test_a_trajectory_depends_on_seed_row_and_index_only() -> None:
    row = ROWS["32k"]
    long = list(synthesise(row, 20, seed=5))
    assert list(synthesise(row, 7, seed=5)) == long[:7]
    assert list(synthesise(row, 7, seed=6)) != long[:7]
    assert len({item.id for item in long}) == 20
    # Frozen: a change of this figure is a change of everybody's benchmark.
    first = {}
    for name, row in ROWS.items():
        rounds = next(synthesise(row)).rounds[:3]
        first[name] = [(item.append_tokens, item.gen_tokens) for item in rounds]
    assert first == {
        "32k": [(1650, 117), (69, 62), (20, 59)],
        "48k": [(2327, 36), (370, 93), (664, 151)],
        "64k": [(3868, 185), (10, 116), (74, 56)],
    }


def test_regular_agents() -> None:
    agents = list(regular(3, 2, 100, 8, first_append_tokens=500))
    assert [agent.id for agent in agents] == ["regular-0", "regular-1", "regular-2"]
    assert agents[0].rounds == (Round(500, 8, 0.0), Round(100, 8, None))
    assert next(regular(1, 1, 7, 1)).rounds == (Round(7, 1, None),)
    for wrong in ((0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1), (1, 1, -1, 1)):
        with pytest.raises(ValueError, match="must"):
            list(regular(*wrong))


def test_tool_latency_changes_nothing_else() -> None:
    plain = list(regular(50, 20, 10, 5))
    slow = list(with_tool_latency(iter(plain), 11.0, 1.2, seed=1))
    assert slow == list(with_tool_latency(iter(plain), 11.0, 1.2, seed=1))
    for before, after in zip(plain, slow, strict=True):
        assert [r.append_tokens for r in before.rounds] == [r.append_tokens for r in after.rounds]
        assert after.rounds[-1].tool_latency_s is None
    latencies = sorted(r.tool_latency_s for t in slow for r in t.rounds[:-1])  # type: ignore[type-var]
    assert latencies[len(latencies) // 2] == pytest.approx(11.0, rel=0.2)


def test_statistics_by_hand() -> None:
    stats = trace_stats(
        [
            Trajectory("a", (Round(100, 10, 2.0), Round(20, 30, None))),
            Trajectory("b", (Round(40, 4, None),)),
        ]
    )
    assert (stats.trajectories, stats.requests) == (2, 3)
    assert stats.turns == 1.5
    assert stats.total == (160 + 44) / 2
    assert stats.macro == Reading((60 + 40) / 2, (20 + 4) / 2, ((100 + 130) / 2 + 40) / 2)
    assert stats.request == Reading(160 / 3, 44 / 3, 270 / 3)
    assert (stats.tokens_in, stats.tokens_out, stats.max_context) == (270, 44, 160)
    assert stats.hit_ratio == 1 - 160 / 270
    assert stats.tool_latency_s == 2.0
    with pytest.raises(ValueError, match="no trajectories"):
        trace_stats([])


@pytest.mark.parametrize(
    ("name", "count"), [("claude_code.jsonl.gz", 766), ("mooncake_conversation.jsonl.gz", 756)]
)
def test_public_traces_counted_a_second_way(name: str, count: int) -> None:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is not here (looked in ../shared/traces)")
    with gzip.open(path) as lines:
        plain = [json.loads(line)["rounds"] for line in lines]
    stats = trace_stats(read_trace(path))
    assert stats.trajectories == len(plain) == count
    assert stats.requests == sum(map(len, plain))
    appended = sum(item[0] for rounds in plain for item in rounds)
    prompts = sum(
        sum(append + gen for append, gen, _ in rounds[:n]) + rounds[n][0]
        for rounds in plain
        for n in range(len(rounds))
    )
    assert stats.request.append == appended / stats.requests
    assert stats.tokens_in == prompts
    if name.startswith("claude_code"):  # the figure its source gives, over a few segments fewer
        assert stats.hit_ratio == pytest.approx(0.969, abs=0.005)
    assert all(item.extra for item in islice(read_trace(path), 20))
