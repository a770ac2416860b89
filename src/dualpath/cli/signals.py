"""Stopping in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

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
