"""The scheduler: which PE, which DE, which read path. Pure: state and ``now`` in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.config import Role
from dualpath.scheduler import integrity
from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.queues import Queues, arrival_of, drop_first
from dualpath.scheduler.registry import build
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Entry, Group
from dualpath.scheduler.types import (
    Assignment,
    Decisions,
    EngineLoad,
    EngineReport,
    EngineSpec,
    ReadPlan,
    Rejection,
    RejectReason,
    Request,
    SchedulerError,
    Snapshot,
)  # fmt: skip

_NO_READ = ReadPlan(0, 0)


class Scheduler:
    """Assigns requests to engines when groups fetch. docs/scheduler.md has the policy on one page.

    One owner: not thread safe. Every call either has its whole effect or raises before it has any,
    except ``fetch`` with a policy that breaks its protocol.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises ValueError when a policy's name is unknown."""
        self.settings = settings
        self._prefill, self._decode, self._path = build(settings)
        self._cluster = Cluster()
        self._entries: dict[str, Entry] = {}
        self._queues = Queues(self._cluster)
        self._rejected: list[Rejection] = []  # found between fetches, returned by the next one
        self._largest_hbm = 0
        self._arrivals = 0
        self._completed = 0
        self._rejections = 0

    # ---- engines -------------------------------------------------------------------------------

    def add_engine(self, spec: EngineSpec) -> None:
        """An engine joins and gets work from its group's next fetch on.

        Raises:
            SchedulerError: the name is taken, or group, node and role do not go together.
        """
        self._cluster.add(spec)
        self._largest_hbm = self._cluster.largest_hbm()
        self._queues.unpark()

    def remove_engine(self, name: str) -> list[str]:
        """An engine is gone.

        Requests that no fetch has returned yet go back to their queue, in order of arrival. All
        others that were assigned to it and had not left it are dropped from both sides.

        Returns:
            The dropped requests in order of arrival: submit them again, or fail them.

        Raises:
            SchedulerError: no such engine.
        """
        engine = self._engine(name)
        self._take_out(engine)
        dropped = sorted((hold.entry for hold in engine.holds.values()), key=arrival_of)
        for entry in dropped:
            self._forget(entry, settled=False)
        self._cluster.remove(engine)
        self._largest_hbm = self._cluster.largest_hbm()
        self._reject_too_large()
        return [entry.rid for entry in dropped]

    def drain(self, name: str) -> None:
        """Give an engine no new work; what was returned by a fetch stays on it.

        Raises:
            SchedulerError: no such engine.
        """
        self._take_out(self._engine(name))

    def undrain(self, name: str) -> None:
        """Let a drained engine get work again.

        Raises:
            SchedulerError: no such engine.
        """
        engine = self._engine(name)
        if not engine.active:
            self._cluster.set_active(engine, True)
            self._queues.unpark()

    def silent(self, now_s: float, timeout_s: float) -> list[str]:
        """Active engines whose last report is more than ``timeout_s`` old (on the clock that
        ``fetch`` is given); an engine that never reported is not among them."""
        return [
            engine.name
            for engine in self._cluster.engines.values()
            if engine.active
            and engine.reported_s is not None
            and now_s - engine.reported_s > timeout_s
        ]

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> Rejection | None:
        """Queue a request for a PE and for a DE at once. O(1).

        Returns:
            Why it can never be served (it is not queued then), else None.

        Raises:
            SchedulerError: a request of that rid is queued or assigned.
        """
        if request.rid in self._entries:
            raise SchedulerError(f"request {request.rid!r} is queued or assigned already")
        self._arrivals += 1
        entry = Entry(request, self._arrivals)
        if self._largest_hbm and entry.need > self._largest_hbm:
            return self._rejection(entry)
        self._entries[entry.rid] = entry
        self._queues.add(entry)
        return None

    def fetch(self, group: str, reports: Sequence[EngineReport], now_s: float) -> Decisions:
        """The leader of ``group`` reports its engines and asks for work.

        An assignment is returned once, by the fetch of either side that completed it, so it may
        name engines that this group does not have. A group without engines gets nothing: the
        fetch was under way when the last of them was removed.

        Args:
            group: whose leader fetches.
            reports: state of the group's engines, as many as are known; see ``EngineReport``.
            now_s: the caller's clock, which must not go backwards.

        Raises:
            SchedulerError: a report is about an engine of another group.
        """
        done: list[Assignment] = []
        fetching = self._cluster.groups.get(group)
        if fetching is None:
            self._cluster.stale_reports += len(reports)
        else:
            self._cluster.apply(fetching, reports, self._entries, now_s)
            if fetching.active:
                if fetching.role is Role.PREFILL:
                    self._fetch_prefill(fetching, done)
                else:
                    self._queues.place(self._decode)
                    self._fetch_decode(fetching, done)
        rejected, self._rejected = tuple(self._rejected), []
        self._completed += len(done)
        return Decisions(tuple(done), rejected)

    def read_done(self, rid: str, side: Role, tokens: int | None = None) -> None:
        """``tokens`` more of a request's hit (None: all the rest of that side's share) were read.

        Optional: shortens the node's read queue before the next report does. Unknown requests are
        ignored, since the message may be late.
        """
        entry = self._entries.get(rid)
        if entry is None:
            return
        hold = entry.prefill if side is Role.PREFILL else entry.decode
        if hold is not None:
            self._cluster.read(hold, hold.read if tokens is None else tokens)

    def prefill_done(self, rid: str) -> None:
        """The PE has finished its part: the request leaves tok_e and seq_e of the PE. Late or
        repeated calls do nothing."""
        entry = self._entries.get(rid)
        if entry is not None and entry.complete and entry.prefill is not None:
            self._cluster.leave(entry.prefill, settled=True)
            entry.prefill = None

    def finish(self, rid: str) -> None:
        """The request is over: everything it holds is given back. Idempotent."""
        if (entry := self._entries.get(rid)) is not None:
            self._forget(entry, settled=True)

    def cancel(self, rid: str) -> None:
        """Give a request up at any stage, queued or assigned; an unfinished read leaves its node's
        queue. Idempotent."""
        if (entry := self._entries.get(rid)) is not None:
            self._forget(entry, settled=False)

    # ---- looking in ----------------------------------------------------------------------------

    @property
    def waiting_prefill(self) -> int:
        """Requests without a PE. O(1)."""
        return len(self._queues.fifo)

    def waiting_decode(self, group: str) -> int:
        """Requests without a DE that the next fetch of ``group`` will look at. O(1).

        Raises:
            SchedulerError: no such group.
        """
        known = self._cluster.groups.get(group)
        if known is None:
            raise SchedulerError(f"no group is called {group!r}")
        return len(self._queues.arrived) + len(known.queue)

    @property
    def idle(self) -> bool:
        """Whether no request is queued or assigned and nothing is promised, held or to be read."""
        return not self._entries and not any(
            engine.holds or engine.promised or engine.node.readers
            for engine in self._cluster.engines.values()
        )

    def snapshot(self) -> Snapshot:
        """Figures for metrics. O(engines)."""
        queues = self._queues
        private = sum(len(group.queue) for group in self._cluster.groups.values())
        return Snapshot(
            waiting_prefill=len(queues.fifo),
            waiting_decode=len(queues.arrived) + len(queues.parked) + private,
            parked=len(queues.parked),
            assigned=sum(entry.complete for entry in self._entries.values()),
            submitted=self._arrivals,
            completed=self._completed,
            rejected=self._rejections,
            stale_reports=self._cluster.stale_reports,
            engines=tuple(
                EngineLoad(
                    name=engine.name,
                    role=engine.role,
                    group=engine.group.name,
                    node=engine.node.name,
                    active=engine.active,
                    seq=engine.seq,
                    tok=engine.tok,
                    read_q=engine.node.read_q,
                    hbm_free=engine.free,
                )
                for engine in self._cluster.engines.values()
            ),
        )

    def check_integrity(self) -> None:
        """Recount every figure from the requests.

        Raises:
            AssertionError: one is off.
        """
        integrity.check(self._cluster, self._queues, self._entries)

    # ---- inside a fetch ------------------------------------------------------------------------

    def _fetch_prefill(self, group: Group, done: list[Assignment]) -> None:
        fifo, take = self._queues.fifo, self._cluster.take
        if not fifo:
            return
        choose = self._prefill.open(group, self._cluster).choose
        taken = 0
        try:
            for entry in fifo.values():
                engine = choose(entry.tokens)
                if engine is None:
                    return
                taken += 1
                entry.prefill = take(entry, engine, 0)
                if entry.decode is not None:
                    done.append(self._complete(entry))
        finally:
            drop_first(fifo, taken)

    def _fetch_decode(self, group: Group, done: list[Assignment]) -> None:
        """DE phase 2."""
        queue, take = group.queue, self._cluster.take
        room, waiting_tokens = group.free, 0
        for entry in queue.values():
            room -= entry.need
            if room < 0:
                break
            waiting_tokens += entry.tokens
        if not waiting_tokens:
            return  # nobody waits, or the head does not even fit all room together
        choose = self._decode.open(group, waiting_tokens).choose
        taken = 0
        try:
            for entry in queue.values():
                engine = choose(entry.tokens, entry.need)
                if engine is None:
                    return
                taken += 1
                group.queued -= entry.tokens
                entry.group = None
                entry.decode = take(entry, engine, entry.need)
                if entry.prefill is not None:
                    done.append(self._complete(entry))
        finally:
            drop_first(queue, taken)

    def _complete(self, entry: Entry) -> Assignment:
        """Both sides are known: choose the read path."""
        prefill, decode, request = entry.prefill, entry.decode, entry.request
        assert prefill is not None and decode is not None
        plan = _NO_READ
        if request.hit_tokens:
            plan = self._path.plan(request, prefill.engine.node, decode.engine.node)
        self._cluster.deliver(prefill, plan.prefill_tokens)
        self._cluster.deliver(decode, plan.decode_tokens)
        entry.complete = True
        return Assignment(entry.rid, prefill.engine.name, decode.engine.name, plan)

    # ---- outside a fetch -----------------------------------------------------------------------

    def _engine(self, name: str) -> Engine:
        engine = self._cluster.engines.get(name)
        if engine is None:
            raise SchedulerError(f"no engine is called {name!r}")
        return engine

    def _take_out(self, engine: Engine) -> None:
        """No new work, and what no fetch has returned yet goes back to its queue."""
        if not engine.active:
            return
        self._cluster.set_active(engine, False)
        back = [hold for hold in engine.holds.values() if not hold.delivered]
        for hold in back:
            self._cluster.leave(hold, settled=False)
            if engine.role is Role.PREFILL:
                hold.entry.prefill = None
            else:
                hold.entry.decode = None
        entries = [hold.entry for hold in back]
        if engine.role is Role.PREFILL:
            self._queues.again_for_prefill(entries)
        else:
            # Its group may now be too small for some that wait there.
            group = engine.group
            homeless = [entry for entry in group.queue.values() if entry.need > group.largest]
            self._queues.again_for_decode(entries + homeless)

    def _reject_too_large(self) -> None:
        if self._largest_hbm:  # without any DE requests wait: one may join
            for entry in self._queues.larger_than(self._largest_hbm):
                self._forget(entry, settled=False)
                self._rejected.append(self._rejection(entry))

    def _rejection(self, entry: Entry) -> Rejection:
        self._rejections += 1
        return Rejection(
            entry.rid,
            RejectReason.LARGER_THAN_HBM,
            f"needs {entry.need} tokens of KV cache, the largest decode engine has "
            f"{self._largest_hbm}",
        )

    def _forget(self, entry: Entry, settled: bool) -> None:
        """Take a request out of everything (``settled``: see ``Cluster.leave``)."""
        del self._entries[entry.rid]
        if not entry.complete:
            self._queues.discard(entry)
        if entry.prefill is not None:
            self._cluster.leave(entry.prefill, settled)
        if entry.decode is not None:
            self._cluster.leave(entry.decode, settled)
        # A hold knows its entry: leave no cycle for the garbage collector.
        entry.prefill = entry.decode = None
