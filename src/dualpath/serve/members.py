"""The engines that have joined, and what is known of each.

An engine is *lost* when its connection ends: nothing more will be heard of its sessions, so the
requests on it fail at once. It is *over* when it is certain that it does no more I/O: its process
is dead, or it has joined again (an engine ends everything old before it says Hello). Only then may
memory that it could write to be used again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dualpath.config import Role
from dualpath.control.channel import Channel
from dualpath.control.messages import (
    EngineStats,
    Hello,
    Message,
    PeerGone,
    PeerInfo,
    PeerUp,
    ToFront,
)
from dualpath.serve import background
from dualpath.serve.attention import AttentionSamples
from dualpath.serve.process import ProcessId, identify, is_dead
from dualpath.serve.sessions import EngineSession, SessionTable

logger = logging.getLogger(__name__)
_PROOF_POLL_S = 0.05


class Member:
    """One connection of one engine. Belongs to the event loop."""

    def __init__(self, hello: Hello, channel: Channel[ToFront]) -> None:
        loop = asyncio.get_running_loop()
        self.hello = hello
        self.role = Role(hello.role)
        self.stats: EngineStats = hello.stats
        self.heard_s = time.monotonic()
        self.failing = ""
        self.fresh = True
        self.serving = False  # its HTTP server answers; it joins before that
        self.in_place = hello.weights_in_place or hello.weights_changed
        self.sessions = SessionTable()
        self.attention = AttentionSamples()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()  # lost or stuck
        self.process: ProcessId | None = identify(hello.host_id, hello.pid)
        self._channel = channel

    @property
    def name(self) -> str:
        """``pe0``, ``de3``."""
        return self.hello.peer.engine

    @property
    def peer(self) -> PeerInfo:
        """What other engines need to reach it."""
        return self.hello.peer

    @property
    def usable(self) -> bool:
        """Whether new work may be sent to it."""
        return self.serving and self.fresh and not self.failing and not self.lost.done()

    def send(self, message: Message) -> None:
        """Queue a message; dropped when the connection is over (``lost`` says so)."""
        self._channel.send(message)

    def open_session(self, rid: str, attempt: int) -> EngineSession:
        """A new session; its answers are awaited from now on."""
        session = EngineSession(self, rid, attempt)
        self.sessions.add(session)
        return session

    async def disconnect(self) -> None:
        """Close the connection."""
        await self._channel.close()


@dataclass(frozen=True, slots=True)
class _Past:
    """What an engine had counted when it was last heard of."""

    incarnation: str
    node: str
    counters: Mapping[str, float]


class Members:
    """All engines. Belongs to the event loop.

    Args:
        changed: called with a member that has become usable or stopped being so.
        report_timeout_s: silence after which an engine gets no new work.
        stuck_s: silence after which it is *stuck*: requests that can still be tried elsewhere
            no longer wait for it. It may wake, so nothing it could write to is given back.
        grace_s: how long after a lost connection an engine on another machine may still be
            doing I/O that it began before: its own transfers' deadline, doubled.
        died: called when waiting for an engine's end fails: what it could write to would stay held.
    """

    def __init__(
        self,
        changed: Callable[[Member], None],
        *,
        report_timeout_s: float,
        stuck_s: float,
        grace_s: float,
        died: background.Died,
    ) -> None:
        self._died = died
        self._changed = changed
        self._report_timeout_s = report_timeout_s
        self._stuck_s = stuck_s
        self._grace_s = grace_s
        self._members: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._burials: set[asyncio.Task[None]] = set()
        self._past: dict[str, _Past] = {}
        self._gone: dict[str, dict[str, float]] = {}
        # By name: earlier connections of its process with sessions that are not closed yet.
        self._unfinished: dict[str, list[Member]] = {}
        self._closing = False
        self._news = asyncio.Event()

    def all(self) -> list[Member]:
        """Every connected engine."""
        return list(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        """The engine called ``name``, when it is connected."""
        return self._members.get(name)

    def current(self, member: Member) -> Member:
        """The connection that the same process has now; ``member`` itself when it has none."""
        now = self._members.get(member.name)
        if now is not None and now.peer.incarnation == member.peer.incarnation:
            return now
        return member

    def usable(self, role: Role) -> list[Member]:
        """Engines of ``role`` that may get work."""
        return [
            member for member in self._members.values() if member.role is role and member.usable
        ]

    @property
    def ready(self) -> bool:
        """Whether at least one engine of each role is usable."""
        return all(self.usable(role) for role in Role)

    async def wait_usable(self, role: Role) -> Member:
        """An engine of ``role``; waits for one to come. The caller sets the deadline."""
        while not (found := self.usable(role)):
            self._news.clear()
            await self._news.wait()
        return min(found, key=lambda member: (len(member.sessions), member.name))

    def join(self, member: Member) -> None:
        """Take an engine in and introduce it to the others. Replaces an older connection of the
        same process; the caller has refused a name that another process holds."""
        name = member.name
        old = self._members.pop(name, None)
        if old is not None:
            self._lose(old, "the engine connected again")
        leaving = self._leaving.pop(name, None)
        befores = [before for before in (*self._unfinished.pop(name, ()), old, leaving) if before]
        unfinished = [
            before
            for before in befores
            if before.sessions and before.peer.incarnation == member.peer.incarnation
        ]
        for before in befores:
            self._end(before, same=before.peer.incarnation == member.peer.incarnation)
        if unfinished:
            self._unfinished[name] = unfinished
        others = list(self._members.values())
        self._members[name] = member
        for other in others:
            # A newcomer says hello only when it is quiet; those who are here already may still
            # write for sessions of the newcomer's earlier connections.
            other.send(PeerUp(peer=member.peer))
            member.send(PeerUp(peer=other.peer, quiet=not unfinished))
        self._tell(member)
        logger.info("engine %s joined (%s)", name, member.hello.http_url)

    def leave(self, member: Member, reason: str) -> None:
        """The connection has ended."""
        if self._members.get(member.name) is not member:
            return
        del self._members[member.name]
        self._leaving[member.name] = member
        self._lose(member, reason)
        task = background.start(self._bury(member), f"burial of {member.name}", self._died)
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    def heard(self, member: Member, stats: EngineStats) -> None:
        """A report has come."""
        member.heard_s = time.monotonic()
        member.stats = stats
        if member.gone.done() and not member.lost.done():
            member.gone = asyncio.get_running_loop().create_future()
        if not member.fresh:
            member.fresh = True
            logger.info("engine %s reports again", member.name)
            self._tell(member)

    def serves(self, member: Member) -> None:
        """Its HTTP server answers."""
        member.serving = True
        self._tell(member)

    def fail(self, member: Member, reason: str) -> None:
        """A background part of the engine died."""
        member.failing = reason
        logger.error("engine %s is failing: %s", member.name, reason)
        self._tell(member)

    def check_silence(self) -> None:
        """Give no new work to engines that have been silent too long."""
        now = time.monotonic()
        for member in self._members.values():
            if member.fresh and now - member.heard_s > self._report_timeout_s:
                member.fresh = False
                logger.warning("engine %s is silent; it gets no new work", member.name)
                self._tell(member)
            if not member.gone.done() and now - member.heard_s > self._stuck_s:
                member.gone.set_result(f"silent for more than {self._stuck_s:g} s")

    def total(self, counter: str) -> dict[str, int]:
        """A counter by node, over all engines there have been: it never falls."""
        totals: defaultdict[str, float] = defaultdict(float)
        for node, counters in self._gone.items():
            totals[node] += counters.get(counter, 0)
        present = {member.peer.incarnation for member in self._members.values()}
        for past in self._past.values():
            if past.incarnation not in present:
                totals[past.node] += past.counters.get(counter, 0)
        for member in self._members.values():
            totals[member.hello.node] += member.stats.counters.get(counter, 0)
        return {node: int(value) for node, value in totals.items()}

    async def close(self) -> None:
        """Disconnect every engine."""
        self._closing = True
        members = list(self._members.values())
        await asyncio.gather(*(member.disconnect() for member in members))
        # Afterwards: who notices that its connection is closed is buried too.
        for task in list(self._burials):
            task.cancel()
        await asyncio.gather(*self._burials, return_exceptions=True)
        for member in members:
            self._lose(member, "the front is stopping")
        self._members.clear()

    def _lose(self, member: Member, reason: str) -> None:
        self._remember(member)
        if not member.lost.done():
            member.lost.set_result(reason)
        if not member.gone.done():
            member.gone.set_result(reason)
        self._tell(member)
        if self._closing:
            logger.info("engine %s is disconnected: the front is stopping", member.name)
        else:
            logger.warning("engine %s is lost: %s", member.name, reason)

    def _remember(self, member: Member) -> None:
        """Keep a lost engine's totals: apart while it may come back, as it goes on counting; with
        all others' once another process has taken its place."""
        before = self._past.get(member.name)
        if before is not None and before.incarnation != member.peer.incarnation:
            gone = self._gone.setdefault(before.node, {})
            for name, value in before.counters.items():
                gone[name] = gone.get(name, 0) + value
        self._past[member.name] = _Past(
            member.peer.incarnation, member.hello.node, member.stats.counters
        )

    async def _bury(self, member: Member) -> None:
        """Wait until the engine certainly does no more I/O, then tell the others."""
        if member.process is None:
            await asyncio.wait({member.over}, timeout=self._grace_s)
        else:
            while not member.over.done() and not is_dead(member.process):
                await asyncio.wait({member.over}, timeout=_PROOF_POLL_S)
        if self._leaving.get(member.name) is member:
            del self._leaving[member.name]
            self._end(member, same=False)

    def _end(self, member: Member, *, same: bool) -> None:
        """``member`` does no more I/O. ``same``: its process lives on under a new connection."""
        if member.over.done():
            return
        member.over.set_result(None)
        if not same:
            for other in self._members.values():
                other.send(PeerGone(engine=member.name, incarnation=member.peer.incarnation))

    def _tell(self, member: Member) -> None:
        self._news.set()
        self._changed(member)
