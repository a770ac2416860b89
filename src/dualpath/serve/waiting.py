"""Waiting for something that an engine owes, and only while the engine lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dualpath.serve.errors import EngineLost
from dualpath.serve.members import Member

T = TypeVar("T")


async def any_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until one of them is done, whatever its outcome; False when the time is up first."""
    done, _ = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def answer_of(future: asyncio.Future[T], *members: Member) -> T:
    """The future's result. The caller sets the deadline; the future is not cancelled.

    Raises:
        EngineLost: one of ``members`` was lost, or got stuck, first.
    """
    await any_of(future, *_ends(members))
    if future.done():
        return future.result()
    raise _lost(members)


async def run_while(
    work: Coroutine[Any, Any, T], *members: Member, committed: Callable[[], bool] = lambda: False
) -> T:
    """Run ``work`` as long as ``members`` live; it is over, perhaps by cancellation, when this
    returns or raises.

    Args:
        committed: once true, there is no other way than ``work``, so an engine that is merely
            stuck is waited for.

    Raises:
        EngineLost: one of ``members`` was lost, or got stuck, first.
    """
    task = asyncio.create_task(work)
    try:
        await any_of(task, *_ends(members))
        if not task.done() and committed():
            await any_of(task, *(member.lost for member in members))
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            # Its own failure no longer matters; that it has ended does.
            await asyncio.gather(task, return_exceptions=True)
    raise _lost(members)


def _ends(members: tuple[Member, ...]) -> list[asyncio.Future[str]]:
    return [end for member in members for end in (member.lost, member.stuck)]


def _lost(members: tuple[Member, ...]) -> EngineLost:
    for member in members:
        for end in (member.lost, member.stuck):
            if end.done():
                return EngineLost(f"engine {member.name} was lost: {end.result()}")
    raise AssertionError("no engine was lost")
