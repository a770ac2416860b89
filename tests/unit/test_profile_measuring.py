"""SNIC rates from looks at totals; which attention steps are measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.workload.attention_grid import grid, measurements, pass_s
from dualpath.workload.snic_rate import Busy, Look, over_all, while_busy

pytestmark = pytest.mark.unit


def looks(*rows: tuple[float, int, bool]) -> list[Look]:
    return [Look(*row) for row in rows]


def test_only_what_was_read_while_reads_queued_counts() -> None:
    # Reports every 2 s; 10 bytes a second while busy; idle from 8 to 20; then 5 bytes a second.
    seen = looks(
        (0, 0, False),
        (1, 0, True), (2, 20, True), (3, 20, True), (4, 40, True), (5, 40, True), (6, 60, True),
        (8, 70, False), (20, 70, False),
        (21, 70, True), (22, 80, True), (24, 90, True),
    )  # fmt: skip
    # From the first rise to the last one of each stretch: 20 -> 60 in 4 s, 80 -> 90 in 2 s.
    assert while_busy(seen) == Busy(50, 6.0)
    assert while_busy(seen[:7]).bytes_s == 10.0
    assert over_all(seen, 0.0) == Busy(90, 24.0)


def test_nothing_is_known_of_a_snic_that_was_not_seen_busy() -> None:
    seen = looks((0, 0, False), (1, 500, False), (2, 900, True), (3, 900, False))
    assert while_busy(seen) == Busy(0, 0.0)
    assert Busy(0, 0.0).bytes_s == 0.0
    assert over_all(seen, -1.0) == Busy(900, 3.0)
    assert over_all([], 0.0) == while_busy([]) == Busy(0, 0.0)


@given(st.floats(1e3, 1e9), st.integers(2, 40), st.integers(1, 7), st.booleans())
def test_a_steady_snic_gives_its_rate_however_often_it_is_looked_at(
    rate: float, reports: int, looks_each: int, idle_before: bool
) -> None:
    """Each report is seen several times; the total is what was read when it was made."""
    seen = [Look(-1.0, 0, False)] if idle_before else []
    for report in range(reports):
        for part in range(looks_each):
            at_s = report + part / looks_each
            seen.append(Look(at_s, int(report * rate), True))
    busy = while_busy(seen)
    if reports > 2:
        assert busy.seconds == reports - 2
        assert busy.bytes_s == pytest.approx(rate, rel=1e-2)


def test_the_grid_goes_from_nothing_cached_to_all() -> None:
    cells = grid(8, 64, 256)
    assert {cached for cached, _ in cells} == {0, 128, 256, 384, 512}
    assert {bsz for _, bsz in cells} == {32, 64, 128, 256}
    assert len(cells) == 20
    assert all(cached % 64 == 0 for cached, _ in grid(1, 64, 8))
    # 5 * 480 miss tokens at 100 a second; 4 * 1280 cached tokens of 10 bytes at 1,000 a second.
    assert pass_s(cells, 10, 1000.0, 100.0) == pytest.approx(24.0 + 51.2)


def test_an_interrupted_step_does_not_count() -> None:
    times = [5.0, 1.2, 9.0, 1.0, 1.1, 7.0, 1.3, 8.0]
    samples = [(0, 32, time) for time in times] + [(64, 32, 2.0), (64, 8, 0.0)]
    assert [(m.cached, m.bsz, m.seconds) for m in measurements(samples)] == [
        (0, 32, 1.2), (64, 32, 2.0),
    ]  # fmt: skip
