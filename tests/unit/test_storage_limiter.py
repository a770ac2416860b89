"""The NIC limit as arithmetic: every figure here is virtual time."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.storage import Limiter, StoreError
from dualpath.storage.limiter import SLACK_S, ClockState, grant

pytestmark = pytest.mark.unit


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 5_000_000)), min_size=1, max_size=40),
    st.floats(1e3, 1e9),
)
def test_grants_never_exceed_the_rate(steps: list[tuple[float, int]], rate: float) -> None:
    state, now, finish, total = ClockState(), 50.0, -math.inf, 0
    for gap_s, nbytes in steps:
        now += gap_s
        after = grant(state, now, nbytes, rate, math.inf)
        assert after is not None
        assert after.next_free_s > finish  # first come, first through
        state, finish, total = after, after.next_free_s, total + nbytes
        assert total <= rate * (max(finish, now) - 50.0 + SLACK_S) * (1 + 1e-9)
    assert (state.granted_bytes, state.grants) == (total, len(steps))


def test_a_busy_nic_queues_and_an_idle_one_does_not() -> None:
    first = grant(ClockState(), 10.0, 100, 100.0, math.inf)
    assert first is not None
    assert first.next_free_s == pytest.approx(11.0 - SLACK_S)
    second = grant(first, 10.2, 50, 100.0, math.inf)
    assert second is not None
    assert second.next_free_s == pytest.approx(first.next_free_s + 0.5)
    idle = grant(second, 20.0, 100, 100.0, math.inf)
    assert idle is not None
    assert idle.next_free_s == pytest.approx(21.0 - SLACK_S)


def test_what_cannot_be_in_time_is_not_booked() -> None:
    busy = grant(ClockState(), 0.0, 1000, 100.0, math.inf)
    assert busy is not None
    assert grant(busy, 0.0, 100, 100.0, latest_s=10.5) is None
    assert grant(busy, 0.0, 100, 100.0, latest_s=11.5) is not None


def test_a_clock_that_went_back_means_a_reboot() -> None:
    before = ClockState(next_free_s=5000.0, last_now_s=4990.0, granted_bytes=7, grants=1)
    after = grant(before, 3.0, 100, 100.0, math.inf)
    assert after is not None
    assert after.next_free_s == pytest.approx(4.0 - SLACK_S)
    assert after.granted_bytes == 107


def test_all_who_name_it_share_it(tmp_path: Path) -> None:
    clock = FakeClock()
    one = Limiter.shared(tmp_path, "n0-read", 1000.0, clock)
    two = Limiter.shared(tmp_path, "n0-read", 1000.0, clock)
    other = Limiter.shared(tmp_path, "n0-write", 1000.0, clock)
    assert one.reserve(500, math.inf) == pytest.approx(1000.5 - SLACK_S)
    assert two.reserve(500, math.inf) == pytest.approx(1001.0 - SLACK_S)
    assert other.reserve(500, math.inf) == pytest.approx(1000.5 - SLACK_S)
    assert one.state() == two.state()
    assert one.state().granted_bytes == 1000
    two.close()
    again = Limiter.shared(tmp_path, "n0-read", 1000.0, clock)
    assert again.state().grants == 2
    for limiter in (one, other, again):
        limiter.close()


def test_acquire_waits_for_the_bytes_or_not_at_all(tmp_path: Path) -> None:
    clock = FakeClock()
    limiter = Limiter.shared(tmp_path, "n", 1000.0, clock)
    assert limiter.acquire(2000, deadline=1010.0)
    assert clock.time == pytest.approx(1002.0 - SLACK_S)
    assert not limiter.acquire(20_000, deadline=1010.0)
    assert clock.time == pytest.approx(1002.0 - SLACK_S)
    assert limiter.state().granted_bytes == 2000
    limiter.close()


def test_waiting_late_loses_no_bandwidth(tmp_path: Path) -> None:
    clock = FakeClock()
    limiter = Limiter.shared(tmp_path, "n", 1000.0, clock)
    for _ in range(100):
        assert limiter.acquire(100, math.inf)
        clock.time += SLACK_S / 2  # wakes up late every time
    assert clock.time - 1000.0 <= 10.0 + SLACK_S
    limiter.close()


def test_a_half_written_record_is_ignored(tmp_path: Path) -> None:
    clock = FakeClock()
    limiter = Limiter.shared(tmp_path, "n", 1000.0, clock)
    states = []
    for _ in range(3):
        limiter.reserve(100, math.inf)
        states.append(limiter.state())
    limiter.close()
    raw = bytearray((tmp_path / "n.limit").read_bytes())
    newest = (states[-1].grants % 2) * 64
    raw[newest + 8 : newest + 12] = os.urandom(4)
    (tmp_path / "n.limit").write_bytes(raw)
    limiter = Limiter.shared(tmp_path, "n", 1000.0, clock)
    assert limiter.state() == states[-2]
    limiter.close()


def test_garbage_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "n.limit").write_bytes(b"\xff" * 100)
    limiter = Limiter.shared(tmp_path, "n", 1000.0, FakeClock())
    assert limiter.state() == ClockState()
    limiter.close()


def test_unlimited_counts_and_never_waits() -> None:
    limiter = Limiter.unlimited()
    assert not limiter.limited
    assert limiter.acquire(10**15, math.inf)
    assert limiter.state().granted_bytes == 10**15
    assert limiter.pace_blocks(10**9, 32) == 32


@pytest.mark.parametrize(("rate", "blocks"), [(1e3, 1), (1e6, 5), (1e9, 32)])
def test_paced_callers_ask_for_a_little_nic_time_at_once(
    tmp_path: Path, rate: float, blocks: int
) -> None:
    limiter = Limiter.shared(tmp_path, "n", rate)
    assert limiter.pace_blocks(4000, 32) == blocks
    limiter.close()


@pytest.mark.parametrize(("name", "rate"), [("../x", 1.0), ("", 1.0), ("n", 0.0), ("n", math.nan)])
def test_nonsense_is_refused(tmp_path: Path, name: str, rate: float) -> None:
    with pytest.raises(StoreError):
        Limiter.shared(tmp_path, name, rate)
