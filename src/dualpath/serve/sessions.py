"""What the front waits for from one engine about one try of a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from dualpath.control.messages import Allocated, Closed, Opened, PrefillDone, TurnDurable

if TYPE_CHECKING:
    from dualpath.serve.members import Member

T = TypeVar("T")
Answer = Allocated | Opened | PrefillDone | TurnDurable | Closed


class EngineSession:
    """A session on an engine, named by request id and attempt.

    Each answer is a future that is set once; repeated and late answers change nothing. Belongs
    to the event loop.
    """

    def __init__(self, member: Member, rid: str, attempt: int) -> None:
        loop = asyncio.get_running_loop()
        self.member = member
        self.rid = rid
        self.attempt = attempt
        self.allocated: asyncio.Future[Allocated] = loop.create_future()
        self.opened: asyncio.Future[Opened] = loop.create_future()
        self.prefill_done: asyncio.Future[PrefillDone] = loop.create_future()
        self.durable: asyncio.Future[TurnDurable] = loop.create_future()
        self.closed: asyncio.Future[Closed] = loop.create_future()

    def answer(self, message: Answer) -> None:
        """Take an engine's word."""
        match message:
            case Allocated():
                _settle(self.allocated, message)
            case Opened():
                _settle(self.opened, message)
            case PrefillDone():
                _settle(self.prefill_done, message)
            case TurnDurable():
                _settle(self.durable, message)
            case Closed():
                _settle(self.closed, message)


class SessionTable:
    """Open sessions of one engine by ``(rid, attempt)``."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, int], EngineSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: EngineSession) -> None:
        """Expect answers for ``session``.

        Raises:
            ValueError: the name is taken.
        """
        name = (session.rid, session.attempt)
        if name in self._sessions:
            raise ValueError(f"session {name} is open already")
        self._sessions[name] = session

    def discard(self, session: EngineSession) -> None:
        """Expect no more; idempotent."""
        self._sessions.pop((session.rid, session.attempt), None)

    def answer(self, message: Answer) -> bool:
        """Give an answer to its session; False when there is none (it came too late)."""
        session = self._sessions.get((message.rid, message.attempt))
        if session is None:
            return False
        session.answer(message)
        return True

    def names(self) -> list[str]:
        """``rid#attempt`` of every open session."""
        return [f"{rid}#{attempt}" for rid, attempt in self._sessions]


def _settle(future: asyncio.Future[T], message: T) -> None:
    if not future.done():
        future.set_result(message)
