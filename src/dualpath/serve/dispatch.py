"""The scheduler in the live system: requests wait here until both of their engines are chosen.

All engines of a role fetch together. Their load (seq_e, tok_e) and the nodes' read queues are the
scheduler's own counts: every request goes through this process, so they are exact, and unlike an
engine's report they never miss what is still on its way. What only the engine knows, its HBM in
use, comes from its latest report.
"""

from __future__ import annotations

import asyncio
import logging
import time

from dualpath.config import ClusterConfig, Mode, Role
from dualpath.scheduler import (
    Assignment,
    EngineReport,
    EngineSpec,
    Rejection,
    Request,
    Scheduler,
    Snapshot,
)
from dualpath.scheduler.decision_log import LoggedScheduler
from dualpath.serve.decision_file import DecisionFile
from dualpath.serve.errors import ApiError
from dualpath.serve.members import Member, Members
from dualpath.serve.thresholds import Thresholds

logger = logging.getLogger(__name__)
_SILENCE_CHECKS_PER_TIMEOUT = 4


class RequestsUnderWay(RuntimeError):
    """What was asked needs an idle front."""


class Dispatcher:
    """Belongs to the event loop.

    Raises:
        ConfigError: the profile or the decision log cannot be used.
    """

    def __init__(self, config: ClusterConfig, members: Members) -> None:
        self._config = config
        self._members = members
        self._thresholds = Thresholds(config)
        log = config.scheduler.decision_log
        self._decisions = DecisionFile(log) if log else None
        self._scheduler = self._new_scheduler(config.mode, config.scheduler.policy)
        self._known: dict[str, Member] = {}
        self._waiting: dict[str, asyncio.Future[Assignment | Rejection]] = {}
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Requests without engines."""
        return len(self._waiting)

    @property
    def policy(self) -> str:
        """Name of the policies in use."""
        return self._scheduler.settings.policy

    @property
    def log_lines_lost(self) -> int:
        """Lines of the decision log that could not be written."""
        return 0 if self._decisions is None else self._decisions.lost

    def set_mode(self, mode: Mode, policy: str = "") -> None:
        """Take the policies of ``mode``, or those called ``policy``. Only while no request is
        queued or assigned.

        Raises:
            RequestsUnderWay: there is one.
            ValueError: no policy is called so.
        """
        if self._waiting or not self._scheduler.idle:
            raise RequestsUnderWay("requests are under way")
        self._scheduler = self._new_scheduler(mode, policy)
        members = list(self._known.values())
        self._known.clear()
        for member in members:
            self.sync(member)

    def sync(self, member: Member) -> None:
        """Bring the scheduler's view of an engine up to date with what ``member`` says."""
        name = member.name
        known = self._known.get(name)
        if member.lost.done():
            if known is member:
                del self._known[name]
                # Their requests notice the loss themselves and call ``finish``.
                self._scheduler.remove_engine(name)
            return
        if known is None:
            if member.role is Role.DECODE and member.stats.hbm_tokens_total <= 0:
                return  # its cache is not allocated yet; a later report says so
            self._scheduler.add_engine(self._spec(member))
            self._known[name] = member
        if member.usable:
            self._scheduler.undrain(name)
        else:
            self._scheduler.drain(name)
        self._wake.set()

    async def assign(self, request: Request) -> Assignment:
        """Wait for engines and a read path. The caller sets the deadline, and afterwards calls
        ``finish`` whatever happens.

        Raises:
            ApiError: 400, no engine can ever serve it.
        """
        outcome: asyncio.Future[Assignment | Rejection] = asyncio.Future()
        self._waiting[request.rid] = outcome
        try:
            rejection = self._scheduler.submit(request)
            if rejection is None:
                self._wake.set()
                answer = await outcome
            else:
                answer = rejection
        except asyncio.CancelledError:
            self._scheduler.cancel(request.rid)
            raise
        finally:
            del self._waiting[request.rid]
        if isinstance(answer, Rejection):
            raise ApiError(400, answer.detail or answer.reason.value, param="messages")
        return answer

    def read_done(self, rid: str, role: Role) -> None:
        """One side has read its part."""
        self._scheduler.read_done(rid, role)

    def prefill_done(self, rid: str) -> None:
        """The PE is done with the request."""
        self._scheduler.prefill_done(rid)
        self._changed()

    def finish(self, rid: str) -> None:
        """The request is over; idempotent."""
        self._scheduler.finish(rid)
        self._changed()

    def cancel(self, rid: str) -> None:
        """The request was given up, perhaps in mid-read; idempotent."""
        self._scheduler.cancel(rid)
        self._changed()

    def snapshot(self) -> Snapshot:
        """The scheduler's figures."""
        return self._scheduler.snapshot()

    def check_integrity(self) -> None:
        """Recount the ledger.

        Raises:
            AssertionError: a count is off.
        """
        self._scheduler.check_integrity()

    async def run(self) -> None:
        """Fetch at every interval while requests wait, and at once when something changes."""
        while True:
            self._wake.clear()
            if self._waiting:
                self._fetch()
            timeout = self._config.scheduler.fetch_interval if self._waiting else None
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def write_decisions(self) -> None:
        """Keep the decision log's file up to date."""
        if self._decisions is not None:
            await self._decisions.run()
        else:
            await asyncio.Future()  # a background task must not end

    async def close(self) -> None:
        """Nothing is decided any more: complete the decision log."""
        if self._decisions is not None:
            await self._decisions.close()

    async def watch_silence(self) -> None:
        """Drain engines that stop reporting."""
        pause_s = self._config.scheduler.report_timeout / _SILENCE_CHECKS_PER_TIMEOUT
        while True:
            await asyncio.sleep(pause_s)
            self._members.check_silence()

    def _changed(self) -> None:
        if self._waiting:
            self._wake.set()

    def _fetch(self) -> None:
        now_s = time.monotonic()
        for role in (Role.DECODE, Role.PREFILL):
            group = [member for member in self._known.values() if member.role is role]
            if not group:
                continue
            reports = [
                EngineReport(
                    engine=member.name,
                    seq=None,
                    tok=None,
                    read_q=None,
                    hbm_used=member.stats.hbm_tokens_used if role is Role.DECODE else 0,
                )
                for member in group
            ]
            decisions = self._scheduler.fetch(role.value, reports, now_s)
            for assignment in decisions.assigned:
                self._decided(assignment.rid, assignment)
            for rejection in decisions.rejected:
                self._decided(rejection.rid, rejection)

    def _decided(self, rid: str, decision: Assignment | Rejection) -> None:
        outcome = self._waiting.get(rid)
        if outcome is not None and not outcome.done():
            outcome.set_result(decision)

    def _spec(self, member: Member) -> EngineSpec:
        hello = member.hello
        return EngineSpec(
            name=member.name,
            role=member.role,
            group=member.role.value,
            node=hello.node,
            hbm_tokens=member.stats.hbm_tokens_total if member.role is Role.DECODE else 0,
            read_tokens_per_s=self._thresholds.read_tokens_per_s(hello),
        )

    def _new_scheduler(self, mode: Mode, policy: str) -> Scheduler:
        settings = self._thresholds.settings(mode, policy)
        if self._decisions is None:
            return Scheduler(settings)
        return LoggedScheduler(settings, self._decisions.write)
