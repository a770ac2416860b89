"""Starts, watches, restarts and stops child processes so that nothing is ever left behind.

Every child runs under a warden (``warden.py``) in a session of its own. The warden holds a pipe
from us: when this process ends, even by SIGKILL, the warden stops the program and all its
descendants. When the warden itself is killed, the kernel kills the program and we kill the rest of
its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from dualpath.serve import background

_WARDEN: Final = Path(__file__).with_name("warden.py")
_POLL_S: Final = 0.25
_STOP_SLACK_S: Final = 35.0  # the warden's own time to kill and reap
_LOG_LINES: Final = 12
_LOG_TAIL_BYTES: Final = 16_384

logger = logging.getLogger(__name__)


class ChildState(enum.Enum):
    """Where a child stands."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"


class StartFailed(RuntimeError):
    """A child ended, or was not ready in time, at its first start; says why with its log's end."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep running.

    Attributes:
        name: in messages.
        argv: program and arguments.
        log: file for its output; emptied at the first start, added to at restarts.
        is_ready: whether it can be used; called about four times a second until it says so. Must
            keep a deadline of its own and must not raise.
        env: variables beside the inherited ones.
    """

    name: str
    argv: Sequence[str]
    log: Path
    is_ready: Callable[[], Awaitable[bool]]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a child that ended is started again.

    Attributes:
        first_s, most_s: pause before the first restart, doubled at each further one up to the most.
        healthy_s: a child that was ready for this long starts the pauses anew.
        start_s: most time from start to ready; a child that takes longer is killed and restarted.
        drain_s: most time from SIGTERM to SIGKILL.
    """

    first_s: float = 1.0
    most_s: float = 30.0
    healthy_s: float = 60.0
    start_s: float = 600.0
    drain_s: float = 10.0


Listener = Callable[[str, ChildState, str], None]
"""Told of every change, with the child's name and one line of detail; must not raise or block."""


class Supervisor:
    """Keeps children running from ``start`` to ``stop``. One event loop; use as a context manager.

    The first start of each child must succeed, so that a wrong setting ends in an error and not in
    endless restarts. After that a child that ends is started again, for ever, with growing pauses.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        policy: RestartPolicy | None = None,
        listener: Listener | None = None,
    ) -> None:
        policy = policy or RestartPolicy()
        self._children = [_Child(spec, policy, listener or _log_change) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def states(self) -> dict[str, ChildState]:
        """Where each child stands."""
        return {child.spec.name: child.state for child in self._children}

    def restarts(self) -> dict[str, int]:
        """How often each child was started again."""
        return {child.spec.name: child.restarts for child in self._children}

    async def start(self) -> None:
        """Start all children at once; returns when all are ready.

        Raises:
            StartFailed: one is not; the others may be running (``stop`` ends them).
        """
        self._tasks = [
            background.start(child.keep(), f"keep {child.spec.name}", _died)
            for child in self._children
        ]
        waits = [asyncio.ensure_future(child.first_ready) for child in self._children]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Stop all children: SIGTERM, SIGKILL after the drain time. Safe to call again."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                logger.error("while stopping a child: %r", result)


class _Child:
    """One child's life, in one task."""

    def __init__(self, spec: ChildSpec, policy: RestartPolicy, listener: Listener) -> None:
        self.spec = spec
        self.state = ChildState.STOPPED
        self.restarts = 0
        self.first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._policy = policy
        self._listener = listener

    async def keep(self) -> None:
        """Start, watch and restart until cancelled. Ends early only when the first start fails."""
        pause_s = self._policy.first_s
        try:
            while True:
                try:
                    lived_s, end = await self._life()
                except OSError as error:  # no process, no memory: there may be one later
                    if not self.first_ready.done():
                        raise
                    lived_s, end = 0.0, f"could not be started: {error}"
                if not self.first_ready.done():
                    self.first_ready.set_exception(StartFailed(self._why(end)))
                    return
                if lived_s >= self._policy.healthy_s:
                    pause_s = self._policy.first_s
                self._change(ChildState.BACKING_OFF, f"{end}; restart in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._policy.most_s)
                self.restarts += 1
        except OSError as error:
            self.first_ready.set_exception(StartFailed(f"{self.spec.name}: {error}"))
        finally:
            self.first_ready.cancel()
            self._change(ChildState.STOPPED, "")

    async def _life(self) -> tuple[float, str]:
        """One process from start to end: seconds it was ready, and how it ended."""
        with self._open_log() as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_WARDEN), str(self._policy.drain_s)),
                *self.spec.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.env},
                start_new_session=True,
            )
        self._change(ChildState.STARTING, f"pid {process.pid}, log {self.spec.log}")
        ended = asyncio.create_task(process.wait())
        try:
            if not await self._until_ready(ended):
                if ended.done():
                    return 0.0, _describe(ended.result())
                return 0.0, f"was not ready within {self._policy.start_s:g} s"
            ready_at = time.monotonic()
            self._change(ChildState.READY, "")
            if not self.first_ready.done():
                self.first_ready.set_result(None)
            status = await asyncio.shield(ended)
            return time.monotonic() - ready_at, _describe(status)
        finally:
            await _end(process, ended, self._policy.drain_s + _STOP_SLACK_S)

    async def _until_ready(self, ended: asyncio.Task[int]) -> bool:
        try:
            async with asyncio.timeout(self._policy.start_s):
                while not ended.done():
                    if await self.spec.is_ready():
                        return not ended.done()
                    await asyncio.wait([ended], timeout=_POLL_S)
        except TimeoutError:
            pass  # told by the caller
        return False

    def _open_log(self) -> BinaryIO:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        if not self.restarts:
            return self.spec.log.open("wb")
        log = self.spec.log.open("ab")
        log.write(f"\n---- restart {self.restarts} ----\n".encode())
        log.flush()
        return log

    def _why(self, end: str) -> str:
        lines = [f"{self.spec.name}: {end}; the end of {self.spec.log}:"]
        lines += [f"  {line}" for line in log_tail(self.spec.log)]
        return "\n".join(lines)

    def _change(self, state: ChildState, detail: str) -> None:
        self.state = state
        self._listener(self.spec.name, state, detail)


async def _end(
    process: asyncio.subprocess.Process, ended: asyncio.Task[int], deadline_s: float
) -> None:
    """See the process and all that it started ended, however this task came to its end."""
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            # The process has promised to end within its drain time; a second cancellation does
            # not shorten that, because leaving processes behind is worse than waiting.
            await _unhurried(ended, deadline_s)
        except TimeoutError:
            logger.error("process %d did not stop in %g s: killed", process.pid, deadline_s)
    if not ended.done() or ended.result() < 0:
        # The warden leads this group. After its orderly end the group is empty, and its number
        # may belong to somebody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    if not ended.done():
        ended.cancel()


async def _unhurried(ended: asyncio.Task[int], deadline_s: float) -> None:
    give_up = time.monotonic() + deadline_s
    while not ended.done():
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([ended], timeout=left_s)


def log_tail(path: Path, lines: int = _LOG_LINES) -> list[str]:
    """Last lines of a log that say something; a note in their place when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"({error.strerror})"]
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:] or ["(empty)"]


def _describe(status: int) -> str:
    """The warden's exit status in words."""
    if status < 0:
        return f"its warden was killed by {signal.Signals(-status).name}"
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"


def _died(name: str, error: BaseException) -> None:
    logger.error("%s died: its process is not watched any more", name, exc_info=error)


def _log_change(name: str, state: ChildState, detail: str) -> None:
    level = logging.WARNING if state is ChildState.BACKING_OFF else logging.INFO
    logger.log(level, "%s: %s%s", name, state.value, f": {detail}" if detail else "")


__all__ = [
    "ChildSpec", "ChildState", "Listener", "RestartPolicy", "StartFailed", "Supervisor", "log_tail",
]  # fmt: skip
