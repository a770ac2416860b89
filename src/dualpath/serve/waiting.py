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
    if any(future.done() for future in futures):
        return True
    # What asyncio.wait does, without its sets: a request waits here a dozen times.
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        if timeout_s is None:
            await waiter
        else:
            async with asyncio.timeout(timeout_s):
                await waiter
    except TimeoutError:
        return False
    finally:
        for future in futures:
            future.remove_done_callback(wake)
    return True


async def answer_of(future: asyncio.Future[T], *members: Member) -> T:
    """The future's result. The caller sets the deadline; the future is not cancelled.

    Raises:
        EngineLost: one of ``members`` was lost, or got stuck, first.
    """
    if not future.done():
        ends = [member.gone for member in members]
        await any_of(future, *ends)
        if not future.done():
            raise _lost(members, ends)
    return future.result()


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
    ends = [member.gone for member in members]
    try:
        await any_of(task, *ends)
        if not task.done() and committed():
            ends = [member.lost for member in members]
            await any_of(task, *ends)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            # Its own failure no longer matters; that it has ended does.
            await asyncio.gather(task, return_exceptions=True)
    raise _lost(members, ends)


def _lost(members: tuple[Member, ...], ends: list[asyncio.Future[str]]) -> EngineLost:
    # The futures that were waited for: an engine that was stuck may have a new one by now.
    for member, end in zip(members, ends, strict=True):
        if end.done():
            return EngineLost(f"engine {member.name} was lost: {end.result()}")
    raise AssertionError("no engine was lost")
