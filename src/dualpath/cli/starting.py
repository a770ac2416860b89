"""Shows engines starting, on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from dualpath.serve.supervise import ChildState, Listener


@contextlib.contextmanager
def engine_progress(title: str, console: Console) -> Iterator[tuple[Listener, Callable[[], None]]]:
    """A spinner with every engine's state; plain lines where there is no terminal.

    Yields the supervisor's listener, and what to call when all is ready: the spinner goes then,
    and later changes (a restart) are printed as lines.
    """
    started_s = time.monotonic()
    states: dict[str, ChildState] = {}
    status = console.status(title)
    spinning = console.is_terminal
    if spinning:
        status.start()
    else:
        console.print(f"{title} ...", highlight=False)

    def listen(name: str, state: ChildState, detail: str) -> None:
        states[name] = state
        if spinning:
            now = ", ".join(f"{name} {state.value}" for name, state in sorted(states.items()))
            status.update(f"{title}: {now}")
        elif state is not ChildState.STOPPED:
            tail = f" ({detail})" if detail else ""
            line = f"{name} {state.value} after {time.monotonic() - started_s:.0f} s{tail}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)

    def settled() -> None:
        nonlocal spinning
        if spinning:
            status.stop()
        spinning = False

    try:
        yield listen, settled
    finally:
        settled()
