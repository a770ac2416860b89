"""A run of the lab ends whatever its server does: agents that nobody answers are stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from dualpath.lab.experiments import Shape
from dualpath.lab.measuring import _Counted
from dualpath.lab.network import LabError
from dualpath.lab.replaying import RunFailed, not_ended, replayed, replayed_for
from dualpath.report.lab.results import ResultError
from dualpath.workload import Progress, ReplayOptions, read_records

pytestmark = pytest.mark.integration

SHAPE = Shape(agents=3, context_tokens=64, turns=2, append_tokens=8, gen_tokens=2)
LIMIT_S = 0.5


@contextlib.contextmanager
def quiet(title: str) -> Iterator[Callable[[Progress], None]]:
    del title
    yield lambda now: None


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Takes requests and never answers one; its URL, and whether none is under way."""
    idle = asyncio.Event()
    idle.set()
    open_now = 0

    async def models(request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": [{"id": "m"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        nonlocal open_now
        del request
        open_now += 1
        idle.clear()
        try:
            await asyncio.Event().wait()
        finally:
            open_now -= 1
            if not open_now:
                idle.set()
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        del request
        return web.Response(status=503, text="not now")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{port}", idle
    finally:
        await runner.cleanup()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("aps", [None, 50.0, 0.001])
async def test_agents_that_nobody_answers_are_stopped(aps: float | None, tmp_path: Path) -> None:
    async with silent_server() as (url, idle):
        options = ReplayOptions(url, out=tmp_path, aps=aps)
        result = await replayed_for(SHAPE.measured(), 1, options, "run", quiet, LIMIT_S)
        assert not_ended(result, LIMIT_S) == "0 of 3 agents finished within 0.5 s"
        assert result.figures.interrupted and result.figures.jct_s is None
        assert list(read_records(tmp_path)) == []
        await idle.wait()  # dropped, not left waiting; the test's own limit ends this


@pytest.mark.timeout(60)
async def test_a_run_that_is_to_end_fails_when_it_does_not(tmp_path: Path) -> None:
    async with silent_server() as (url, _):
        options = ReplayOptions(url, out=tmp_path)
        with pytest.raises(RunFailed, match=r"^run: 0 of 3 agents finished within "):
            await replayed(SHAPE.measured(), 1, options, "run", quiet, LIMIT_S)
        # The folder holds a run now: told as everything about folders is.
        with pytest.raises(ResultError, match=r"requests.jsonl: exists already"):
            await replayed(SHAPE.measured(), 1, options, "run", quiet, LIMIT_S)


@pytest.mark.timeout(60)
async def test_metrics_that_the_front_does_not_give_are_no_zeros() -> None:
    async with silent_server() as (url, _):
        lab = SimpleNamespace(front_url=url, admin_key="")  # what is looked at until then
        with pytest.raises(LabError, match=r"/metrics answers HTTP 503: b'not now'"):
            await _Counted.of(lab)  # type: ignore[arg-type]
