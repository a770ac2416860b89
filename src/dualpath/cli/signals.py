"""Stopping in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from rich.console import Console

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets. The second one has its usual effect.

    To be used in a running event loop of the main thread.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def give_back() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def stop_once() -> None:
        stop.set()
        give_back()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop_once)
    try:
        yield stop
    finally:
        give_back()


async def until_stopped(work: Coroutine[Any, Any, T], stopping: Callable[[], None]) -> T | None:
    """Do ``work``; a signal cancels it, and how long it then takes to end is its own affair.

    Args:
        stopping: called when a signal has come, to tell it.

    Returns:
        What ``work`` does; None when a signal ended it.
    """
    with stop_on_signal() as stop:
        running = asyncio.create_task(work)
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                stopping()
                running.cancel()
                await asyncio.wait([running])
            return None if running.cancelled() else running.result()
        finally:
            stopped.cancel()


def say_stopping(console: Console) -> Callable[[], None]:
    """For ``until_stopped``."""
    return lambda: console.print("stopping ...", highlight=False)
