"""A recorded log gives the same decisions again."""

from __future__ import annotations

import random

import pytest

from dualpath.config import Role
from dualpath.scheduler import (
    POLICY_SETS,
    Decisions,
    EngineReport,
    EngineSpec,
    Request,
    SchedulerError,
    SchedulerSettings,
)  # fmt: skip
from dualpath.scheduler.decision_log import LoggedScheduler, ReplayError, replay, starts

pytestmark = pytest.mark.unit


def record(policy: str, seed: int) -> tuple[list[str], list[Decisions]]:
    """A busy life: every kind of call, in an order that the seed decides."""
    rng = random.Random(seed)
    lines: list[str] = []
    s = LoggedScheduler(SchedulerSettings(2000, 9000, policy=policy), lines.append)
    names: list[str] = []
    for number in range(6):
        role = Role.PREFILL if number < 3 else Role.DECODE
        names.append(f"{role.value}{number}")
        s.add_engine(EngineSpec(names[-1], role, f"{role.value}{number % 2}", names[-1], 9600, 1e4))
    groups = {name: f"{name[:-1]}{int(name[-1]) % 2}" for name in names}
    made: list[Decisions] = []
    live: list[str] = []
    for step in range(300):
        match rng.randrange(8):
            case 0 | 1:
                hit = rng.randrange(40) * 64
                request = Request(f"r{step}", hit + rng.randrange(1, 500), hit, 100, 64)
                if s.submit(request) is None:
                    live.append(request.rid)
            case 2 | 3 | 4:
                group = rng.choice(sorted(set(groups.values())))
                reports = [
                    EngineReport(name, None, None, rng.randrange(5000), rng.randrange(5000))
                    for name, its in groups.items()
                    if its == group and rng.random() < 0.5
                ]
                made.append(s.fetch(group, reports, step / 20))
            case 5 if live:
                rid = rng.choice(live)
                s.read_done(rid, rng.choice(list(Role)), rng.choice([None, 64]))
                s.prefill_done(rid)
            case 6 if live:
                rid = live.pop(rng.randrange(len(live)))
                rng.choice([s.finish, s.cancel])(rid)
            case 7:
                rng.choice([s.drain, s.undrain, s.undrain])(rng.choice(names))
    s.remove_engine(names[0])
    made.append(s.fetch("prefill1", [], 99.0))
    s.check_integrity()
    return lines, made


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
def test_replay_gives_the_same_decisions(policy: str) -> None:
    for seed in range(5):
        lines, made = record(policy, seed)
        assert sum(len(d.assigned) for d in made) > 20
        assert replay(lines) == made


def test_another_decision_than_recorded_is_found() -> None:
    lines, _ = record("paper", 1)
    at = next(i for i, line in enumerate(lines) if '"prefill":"prefill0"' in line)
    lines[at] = lines[at].replace('"prefill":"prefill0"', '"prefill":"prefill2"', 1)
    with pytest.raises(ReplayError, match=rf"line {at + 1}: recorded .*, replayed "):
        replay(lines)


def test_what_is_no_log_is_refused_with_its_line() -> None:
    lines, _ = record("paper", 1)
    with pytest.raises(ReplayError, match="line 2: not a decision record"):
        replay([lines[0], lines[1][:-3]])
    with pytest.raises(ReplayError, match="line 1: the log does not begin with its settings"):
        replay(lines[1:])
    with pytest.raises(ReplayError, match="line 2: version 9, not 1"):
        replay([lines[0], lines[0].replace('"version":1', '"version":9')])


def test_a_log_that_was_started_again_replays_on_a_new_scheduler() -> None:
    """Two schedulers one after the other in a file, as a change of mode leaves them."""
    first, made_first = record("paper", 1)
    second, made_second = record("round_robin", 2)
    assert starts(first[0]) and not any(map(starts, first[1:]))
    assert replay([*first, "", *second]) == [*made_first, *made_second]


def test_a_refused_call_is_not_written_down() -> None:
    lines: list[str] = []
    s = LoggedScheduler(SchedulerSettings(1, 1), lines.append)
    with pytest.raises(SchedulerError):
        s.drain("nobody")
    assert len(lines) == 1
