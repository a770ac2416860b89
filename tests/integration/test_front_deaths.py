"""Each background part of the front dies in turn: the front is not healthy, says why and ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import tokens_of
from front_kit import FakeCluster, make_config, running_front

from dualpath.config import Role
from dualpath.serve.app import Routes
from dualpath.serve.balance import Balance
from dualpath.serve.closing import Closer
from dualpath.serve.decision_file import DecisionFile
from dualpath.serve.dispatch import Dispatcher
from dualpath.serve.front import Front
from dualpath.serve.members import Members
from dualpath.serve.upstream import Upstream

pytestmark = pytest.mark.integration

WHAT = "killed by the test"


class Killed(Exception):
    """What no code expects."""


def killed(*_: Any, **__: Any) -> Any:
    raise Killed(WHAT)


async def killed_later(*_: Any, **__: Any) -> None:
    raise Killed(WHAT)


async def ask(cluster: FakeCluster) -> None:
    """Something to do; how it ends is not looked at."""
    with contextlib.suppress(Exception):
        body = {"prompt": tokens_of("a prompt of some length"), "max_tokens": 4}
        await asyncio.wait_for(cluster.post("/v1/completions", body), 3)


async def engine_goes(cluster: FakeCluster) -> None:
    await cluster.de.kill()


async def engine_comes(cluster: FakeCluster) -> None:
    engine = cluster.engine(Role.DECODE, 0)
    cluster.engines["de0"] = engine
    await engine.start()


async def nothing(cluster: FakeCluster) -> None:
    """It happens by itself."""


Act = Callable[[FakeCluster], Awaitable[None]]
PARTS: dict[str, tuple[type, str, Act]] = {
    "dispatcher": (Dispatcher, "_fetch", ask),
    "silence": (Members, "check_silence", nothing),
    "decision log": (DecisionFile, "_append", ask),
    "closing": (Closer, "_close", ask),
    "burial": (Members, "_end", engine_goes),
    "probe": (Upstream, "healthy", engine_comes),
    "callback": (Dispatcher, "read_done", ask),
}


@pytest.mark.parametrize("part", PARTS)
async def test_its_death_ends_the_front(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where, name, act = PARTS[part]
    config = make_config(tmp_path, scheduler={"decision_log": str(tmp_path / "decisions.jsonl")})
    with pytest.raises(RuntimeError, match="a part of the front died") as ended:
        async with running_front(config) as cluster:
            await cluster.add(Role.PREFILL, 0)
            if act is not engine_comes:
                await cluster.add(Role.DECODE, 0)
            alive = inspect.iscoroutinefunction(getattr(where, name))
            monkeypatch.setattr(where, name, killed_later if alive else killed)
            with caplog.at_level(logging.ERROR):
                await act(cluster)
                async with asyncio.timeout(10):
                    await until_failed(caplog)
                monkeypatch.undo()
                async with asyncio.timeout(10):
                    await asyncio.wait({cluster.front})
    assert isinstance(ended.value.__cause__, Killed)
    assert "the front cannot go on" in caplog.text
    assert WHAT in caplog.text


async def until_failed(caplog: pytest.LogCaptureFixture) -> None:
    while "the front cannot go on" not in caplog.text:  # noqa: ASYNC110 - a log has no event
        await asyncio.sleep(0.01)


async def test_a_dead_part_is_seen_by_the_health_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Balance, "run", killed_later)
    front = Front(make_config(tmp_path))
    routes = Routes(front)
    request: Any = None
    try:
        assert (await routes.health(request)).status_code == 200
        await front.start()
        await asyncio.wait_for(asyncio.shield(front.failed), 3)
        assert (await routes.health(request)).status_code == 503
        assert (await routes.ready(request)).status_code == 503
    finally:
        await front.close()


async def test_a_part_that_comes_to_an_end_is_dead_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(self: Any) -> None:
        return

    monkeypatch.setattr(Balance, "run", end)
    front = Front(make_config(tmp_path))
    try:
        await front.start()
        error = await asyncio.wait_for(asyncio.shield(front.failed), 3)
        assert "came to an end" in str(error)
    finally:
        await front.close()


async def test_new_weights_that_cannot_be_taken_in_fail_their_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That engine only: its old KV might be hit."""
    from dualpath.control.messages import WeightsChanged
    from dualpath.serve.epoch import WeightEpoch

    async with running_front(make_config(tmp_path)) as cluster:
        await cluster.add(Role.PREFILL, 0)
        await cluster.add(Role.DECODE, 0)
        monkeypatch.setattr(WeightEpoch, "advance", killed)
        cluster.de.send(WeightsChanged(how="test", serial=1))
        await cluster.usable("de0", False)
        (engine,) = [
            e for e in (await cluster.get("/debug/state"))["engines"] if e["name"] == "de0"
        ]
        assert WHAT in engine["failing"]
        assert await cluster.status("/health") == 200
        monkeypatch.undo()


async def test_an_orderly_stop_loses_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_front(make_config(tmp_path)) as cluster:
            await cluster.add(Role.PREFILL, 0)
            await cluster.add(Role.DECODE, 0)
            cluster.stop.set()
            await asyncio.wait_for(asyncio.shield(cluster.front), 10)
    assert "is lost" not in caplog.text
