"""Each thread, task and callback of an engine dies in turn: the engine is out of service, and the
reason is in the log and at the front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_sessions import LAYOUT, ROOT, WAIT_S, Engine, ScriptedFront, cluster

from dualpath.blocks import chain_keys
from dualpath.config import Role, Size
from dualpath.control.messages import (
    Allocated,
    Close,
    Failing,
    GoDecode,
    OpenDecode,
    Opened,
    SessionSpec,
)
from dualpath.transfer.manager import EngineFailing

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]
pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

WHAT = "killed by the test"
KEYS = chain_keys(ROOT, list(range(64 * 3)), 64)


class Killed(Exception):
    """What no code expects."""


def killed(*_: Any, **__: Any) -> Any:
    raise Killed(WHAT)


@dataclass
class Bench:
    front: ScriptedFront
    de: Engine

    @property
    def services(self) -> Any:
        return self.de.manager._services

    async def opened(self, hit: int = 0) -> None:
        spec = SessionSpec(
            rid="r", attempt=0, root=ROOT, keys=KEYS, prompt_tokens=192, hit_blocks=hit
        )
        self.front.send("de0", OpenDecode(spec=spec, read=(0, hit)))
        await self.front.expect("de0", Allocated)

    async def went(self) -> None:
        await self.opened()
        await self.front.expect("de0", Opened)
        self.front.send("de0", GoDecode(rid="r", attempt=0, good_blocks=0))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    config = cluster(tmp_path)
    room = 64 * (4096 + LAYOUT.slot_bytes)
    storage = msgspec.structs.replace(config.storage, capacity=Size(room))
    async with ScriptedFront() as front:
        de = Engine(
            msgspec.structs.replace(config, storage=storage), Role.DECODE, front.address, tmp_path
        )
        await asyncio.to_thread(de.manager.start)
        await front.joined("de0")
        yield Bench(front, de)
        await asyncio.to_thread(de.manager.stop, WAIT_S)


async def session_task(bench: Bench) -> None:
    bench.services.buffer.pool.allocate = killed
    spec = SessionSpec(rid="r", attempt=0, root=ROOT, keys=KEYS, prompt_tokens=192, hit_blocks=0)
    bench.front.send("de0", OpenDecode(spec=spec, read=(0, 0)))


async def read_thread(bench: Bench) -> None:
    bench.services.store.read = killed
    await bench.opened(hit=1)


async def read_thread_for_nobody(bench: Bench) -> None:
    """The session is closed while the thread works: nobody waits for its outcome any more."""
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*_: Any) -> Any:
        loop.call_soon_threadsafe(started.set)
        asyncio.run(asyncio.sleep(0.3))
        raise Killed(WHAT)

    bench.services.store.read = slow
    await bench.opened(hit=1)
    await started.wait()
    bench.front.send("de0", Close(rid="r", attempt=0, reason="test"))


async def write_thread(bench: Bench) -> None:
    bench.services.store.write = killed
    await bench.went()


async def copy_thread(bench: Bench) -> None:
    bench.services.copy_engine.submit = killed
    await bench.went()
    loading = asyncio.create_task(bench.de.load("r", list(range(6))))
    await asyncio.wait([loading])
    assert loading.exception() is not None


async def pin_thread(bench: Bench) -> None:
    bench.services.store.pin = killed
    await bench.opened(hit=1)


async def unpin_thread(bench: Bench) -> None:
    bench.services.store.unpin = killed
    await bench.opened(hit=1)
    await bench.front.expect("de0", Opened)
    bench.front.send("de0", Close(rid="r", attempt=0, reason="test"))


async def transfer_agent(bench: Bench) -> None:
    bench.services.agent._carrier.work = killed


async def control_connection(bench: Bench) -> None:
    bench.de.manager._dispatch = killed  # type: ignore[method-assign]
    for _ in range(2):  # the loop has looked up where the first goes before
        bench.front.send("de0", Close(rid="x", attempt=0, reason="test"))


async def reports(bench: Bench) -> None:
    bench.de.manager._stats = killed  # type: ignore[method-assign]


async def call_of_vllm(bench: Bench) -> None:
    bench.de.manager.call(killed)


async def traffic_thread(bench: Bench) -> None:
    def end() -> None:
        raise SystemExit(WHAT)

    assert bench.de.manager._loop is not None
    bench.de.manager._loop.call_soon_threadsafe(end)


# Those that take the connection itself along cannot say so over it: its end does.
CUT = (control_connection, traffic_thread)
PARTS = (
    session_task, read_thread, read_thread_for_nobody, write_thread, copy_thread, pin_thread,
    unpin_thread, transfer_agent, reports, call_of_vllm, *CUT,
)  # fmt: skip


@pytest.mark.parametrize("kill", PARTS, ids=lambda kill: kill.__name__)
async def test_its_death_takes_the_engine_out_of_service(
    bench: Bench,
    kill: Callable[[Bench], Awaitable[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert bench.de.manager.failing is None
    with caplog.at_level(logging.ERROR):
        await kill(bench)
        if kill in CUT:
            async with asyncio.timeout(WAIT_S):
                await bench.front.ended("de0")
                while bench.de.manager.failing is None:  # noqa: ASYNC110 - set by a thread
                    await asyncio.sleep(0.01)
        else:
            message = await bench.front.expect("de0", Failing)
            assert isinstance(message, Failing)
            assert WHAT in message.reason
    assert bench.de.manager.failing is not None
    assert WHAT in bench.de.manager.failing
    assert WHAT in caplog.text
    with pytest.raises(EngineFailing, match=WHAT):
        bench.de.manager.call(lambda: None)
