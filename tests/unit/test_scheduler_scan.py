"""Looking at every engine and sorting them choose the same engines."""

from __future__ import annotations

import random

import pytest

from dualpath.config import Role
from dualpath.scheduler import (
    Assignment,
    EngineReport,
    EngineSpec,
    Request,
    Scheduler,
    SchedulerSettings,
)
from dualpath.scheduler.policies import decode_balanced, prefill_least_tokens

pytestmark = pytest.mark.unit

BLOCK = 64


def run(seed: int) -> list[Assignment]:
    """Fetches of up to 40 requests at once, on engines that differ in everything."""
    rng = random.Random(seed)
    scheduler = Scheduler(SchedulerSettings(alpha_tokens=20_000, beta_tokens=30_000))
    names: list[str] = []
    for index in range(12):
        role = Role.PREFILL if index < 5 else Role.DECODE
        names.append(f"e{index}")
        node = f"n{index // 2}-{role.value}"
        scheduler.add_engine(EngineSpec(names[-1], role, role.value, node, 1000 * BLOCK))
    done: list[Assignment] = []
    running: list[str] = []
    serial = 0
    for tick in range(30):
        for _ in range(rng.randrange(0, 40)):
            serial += 1
            prompt = rng.randrange(1, 9000)
            hit = rng.randrange(0, prompt) // BLOCK * BLOCK
            scheduler.submit(Request(f"r{serial}", prompt, hit, rng.randrange(0, 300), BLOCK))
        for role in (Role.PREFILL, Role.DECODE):
            reports = [
                EngineReport(name, None, None, rng.choice((None, 0, 50_000)), rng.randrange(20_000))
                for name in names[slice(0, 5) if role is Role.PREFILL else slice(5, 12)]
            ]
            assigned = scheduler.fetch(role.value, reports, float(tick)).assigned
            done.extend(assigned)
            running.extend(one.rid for one in assigned)
        rng.shuffle(running)
        for _ in range(len(running) // 2):
            scheduler.finish(running.pop())
        scheduler.check_integrity()
    return done


@pytest.mark.parametrize("seed", range(5))
def test_scan_and_sort_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = []
    for scans in (1, 3, 10**9):
        monkeypatch.setattr(prefill_least_tokens, "_SCANS", scans)
        monkeypatch.setattr(decode_balanced, "_SCANS", scans)
        decisions.append(run(seed))
    assert decisions[0] == decisions[1] == decisions[2]
    assert len(decisions[0]) > 100
