"""Ending sessions, in the order that keeps memory safe.

The PE may be writing into the DE's slots until it says ``Closed``. So the DE is told to close only
after that word, or once the PE is certain to do no more I/O.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from dualpath.control.messages import Close
from dualpath.serve import background
from dualpath.serve.members import Member
from dualpath.serve.sessions import EngineSession
from dualpath.serve.waiting import any_of

logger = logging.getLogger(__name__)


class Closer:
    """Closes sessions in the background. Belongs to the event loop.

    Args:
        overdue_s: a session that takes longer to close is reported, and waited for further: the
            wait ends with the engine at the latest.
        overdue: called for each such session.
        died: called when closing itself fails: what the session holds would stay held.
        current: the connection that a member's process has now. An engine that connected again
            has given its sessions up, but keeps what it promised to a PE until this word.
    """

    def __init__(
        self,
        overdue_s: float,
        overdue: Callable[[], None],
        died: background.Died,
        current: Callable[[Member], Member],
    ) -> None:
        self._current = current
        self._overdue_s = overdue_s
        self._overdue = overdue
        self._died = died
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def close_one(self, session: EngineSession, reason: str) -> asyncio.Task[None]:
        """End one session; the task is done when it holds nothing any more."""
        return self._spawn(self._close(session, reason), session)

    def close_pair(
        self,
        prefill: asyncio.Task[None] | None,
        decode: EngineSession,
        reason: str,
        stored_s: float = 0.0,
    ) -> None:
        """End a DE's session after the PE's (None when no PE was ever told of it), and after its
        blocks were stored if that takes at most ``stored_s``."""
        self._spawn(self._close_decode(prefill, decode, reason, stored_s), decode)

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is being closed, then give the rest up."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close_decode(
        self,
        prefill: asyncio.Task[None] | None,
        decode: EngineSession,
        reason: str,
        stored_s: float,
    ) -> None:
        if prefill is not None:
            await asyncio.wait({prefill})
        if stored_s:
            await any_of(decode.durable, decode.member.over, timeout_s=stored_s)
        await self._close(decode, reason)

    async def _close(self, session: EngineSession, reason: str) -> None:
        member = session.member
        try:
            word = Close(rid=session.rid, attempt=session.attempt, reason=reason)
            self._current(member).send(word)
            ends = (session.closed, member.over)
            if not await any_of(*ends, timeout_s=self._overdue_s):
                self._overdue()
                logger.warning(
                    "session %s#%d on %s takes long to close (%s)",
                    session.rid, session.attempt, member.name, reason, extra={"rid": session.rid},
                )  # fmt: skip
                await any_of(*ends)
        finally:
            member.sessions.discard(session)

    def _spawn(
        self, work: Coroutine[None, None, None], session: EngineSession
    ) -> asyncio.Task[None]:
        name = f"close {session.rid}#{session.attempt} on {session.member.name}"
        task = background.start(work, name, self._died)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
