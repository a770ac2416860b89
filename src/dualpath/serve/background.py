"""Tasks of the front that nobody awaits: one that dies must be heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Died = Callable[[str, BaseException], None]
"""Called with a task's name and what it died of."""


def start(
    work: Coroutine[Any, Any, None], name: str, died: Died, *, endless: bool = False
) -> asyncio.Task[None]:
    """Start a task; the caller keeps it. ``died`` is called when it ends by an exception that is
    no cancellation, or, if it is ``endless``, in any other way."""
    task = asyncio.create_task(work, name=name)

    def over(done: asyncio.Task[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None and endless:
            error = RuntimeError("it came to an end")
        if error is not None:
            died(name, error)

    task.add_done_callback(over)
    return task
