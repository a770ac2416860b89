"""The ledger: who holds how many tokens where.

Every number that a policy looks at is changed here and nowhere else, so ``integrity`` can
recount all of them from the requests themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualpath.config import Role
from dualpath.scheduler.group_index import GroupIndex
from dualpath.scheduler.state import Engine, Entry, Group, Hold, Node
from dualpath.scheduler.types import EngineReport, EngineSpec, SchedulerError


class Cluster:
    """Engines, nodes and groups, and what requests hold on them. Not thread safe; one owner.

    Attributes:
        engines, nodes, groups: everything registered, by name.
        active: per role, the engines that may get work, in order of registration.
        by_total: DE groups with an active engine, by their total tok_e.
        stale_reports: reports of engines that are not registered.
    """

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, Group] = {}
        self.active: dict[Role, list[Engine]] = {role: [] for role in Role}
        self.by_total = GroupIndex()
        self.stale_reports = 0
        self._ranks = 0

    # ---- who is there ------------------------------------------------------------------------

    def add(self, spec: EngineSpec) -> Engine:
        """Register an engine; it may get work at once.

        Raises:
            SchedulerError: the name is taken, the group has another role, or the node is in
                another group.
        """
        if spec.name in self.engines:
            raise SchedulerError(f"engine {spec.name!r} is registered already")
        group = self.groups.get(spec.group)
        if group is not None and group.role is not spec.role:
            raise SchedulerError(
                f"engine {spec.name!r}: group {spec.group!r} is of role {group.role.value}"
            )
        node = self.nodes.get(spec.node)
        if node is not None and node.group.name != spec.group:
            raise SchedulerError(
                f"engine {spec.name!r}: node {spec.node!r} is in group {node.group.name!r}"
            )
        self._ranks += 1
        if group is None:
            group = self.groups[spec.group] = Group(spec.group, spec.role, self._ranks)
        if node is None:
            node = self.nodes[spec.node] = Node(spec.node, group)
        node.read_tokens_per_s = spec.read_tokens_per_s
        engine = Engine(spec, node, group, self._ranks)
        self.engines[spec.name] = group.engines[spec.name] = node.engines[spec.name] = engine
        self.set_active(engine, True)
        return engine

    def remove(self, engine: Engine) -> None:
        """Forget an engine that holds nothing any more, and its node and group with the last."""
        assert not engine.holds, f"{engine.name} still holds requests"
        self.set_active(engine, False)
        del self.engines[engine.name], engine.group.engines[engine.name]
        del engine.node.engines[engine.name]
        if not engine.node.engines:
            del self.nodes[engine.node.name]
        if not engine.group.engines:
            del self.groups[engine.group.name]

    def set_active(self, engine: Engine, active: bool) -> None:
        """Let an engine get work, or not. O(engines)."""
        if engine.active == active:
            return
        engine.active = active
        group = engine.group
        group.active = [member for member in group.engines.values() if member.active]
        group.tok = sum(member.tok for member in group.active)
        group.miss = sum(member.miss for member in group.active)
        group.free = sum(member.free for member in group.active)
        group.largest = max((member.capacity for member in group.active), default=0)
        self.active[engine.role] = [
            member
            for member in self.engines.values()
            if member.active and member.role is engine.role
        ]
        if engine.role is Role.DECODE:
            self.by_total.rebuild(
                other
                for other in self.groups.values()
                if other.role is Role.DECODE and other.active
            )

    def largest_hbm(self) -> int:
        """The largest HBM of any registered DE, drained ones included; 0 without a DE."""
        return max((engine.capacity for engine in self.engines.values()), default=0)

    # ---- what requests hold --------------------------------------------------------------------

    def take(self, entry: Entry, engine: Engine, need: int) -> Hold:
        """Assign one side: its tokens count from now on, ``need`` tokens of HBM are promised."""
        hold = engine.holds[entry.rid] = Hold(entry, engine, need)
        tokens = entry.tokens
        engine.tok += tokens
        engine.half_tok += tokens
        engine.seq += 1
        engine.half_seq += 1
        if engine.active:
            engine.group.tok += tokens
        if engine.role is Role.PREFILL:
            engine.miss += entry.miss
            if engine.active:
                engine.group.miss += entry.miss
        if need:
            engine.promised += need
            self._refresh_free(engine)
        return hold

    def deliver(self, hold: Hold, read: int) -> None:
        """The other side is known too: the assignment goes out, with ``read`` tokens to read."""
        engine = hold.engine
        engine.half_tok -= hold.entry.tokens
        engine.half_seq -= 1
        hold.delivered = True
        hold.epoch = engine.epoch
        if read:
            node = engine.node
            node.read_q += read
            node.readers += 1
            hold.read = read
            hold.read_epoch = node.epoch

    def leave(self, hold: Hold, settled: bool) -> None:
        """Give everything back.

        Args:
            hold: what to give back.
            settled: the read is over (the request got past it), so a report that knows of it does
                not count it any more; else what was to be read is taken off the node's queue.
        """
        engine, entry = hold.engine, hold.entry
        tokens, before = entry.tokens, engine.tok
        if not hold.delivered:
            engine.half_tok -= tokens
            engine.half_seq -= 1
        if not hold.delivered or hold.epoch == engine.epoch:
            engine.tok -= tokens
            engine.seq -= 1
        else:
            # The report may have been taken after the engine was done with it: never take off
            # more than the report's share, or newer assignments would be lost.
            over = min(tokens, engine.known_tok)
            engine.known_tok -= over
            engine.tok -= over
            over = min(1, engine.known_seq)
            engine.known_seq -= over
            engine.seq -= over
        del engine.holds[entry.rid]
        if not engine.holds:
            engine.tok = engine.known_tok = engine.seq = engine.known_seq = 0
        if engine.active:
            engine.group.tok += engine.tok - before
        if engine.role is Role.PREFILL:
            engine.miss -= entry.miss
            if engine.active:
                engine.group.miss -= entry.miss
        if hold.need:
            engine.promised -= hold.need
            self._refresh_free(engine)
        if engine.role is Role.DECODE:
            self.by_total.fell(engine.group)
        self.read(hold, hold.read, settled)

    def read(self, hold: Hold, tokens: int, settled: bool = False) -> None:
        """Take up to ``tokens`` of an unfinished read off its node's queue (see ``leave``)."""
        tokens = min(tokens, hold.read)
        if not tokens:
            return
        node = hold.engine.node
        hold.read -= tokens
        if hold.read_epoch == node.epoch:
            node.read_q -= tokens
        elif not settled:
            over = min(tokens, node.known)
            node.known -= over
            node.read_q -= over
        if not hold.read:
            node.readers -= 1
            if not node.readers:
                node.read_q = node.known = 0

    # ---- what engines say ----------------------------------------------------------------------

    def apply(
        self,
        group: Group,
        reports: Sequence[EngineReport],
        entries: dict[str, Entry],
        now_s: float,
    ) -> None:
        """Replace own counts by the reports of a group's leader.

        Raises:
            SchedulerError: an engine of another group is among them.
        """
        group.last_fetch_s = now_s
        read_q: dict[str, int] = {}
        missing: dict[str, None] = {}
        for report in reports:
            engine = self.engines.get(report.engine)
            if engine is None:
                self.stale_reports += 1
                continue
            if engine.group is not group:
                raise SchedulerError(
                    f"engine {engine.name!r} is not in the fetching group {group.name!r}"
                )
            engine.reported_s = now_s
            if report.tok is not None and report.seq is not None:
                self._replace_load(engine, report.tok, report.seq, report.missing)
            if report.hbm_used != engine.used and engine.capacity:
                engine.used = report.hbm_used
                self._refresh_free(engine)
            if report.read_q is not None:
                name = engine.node.name
                read_q[name] = max(read_q.get(name, 0), report.read_q)
            if report.missing:
                missing.update(dict.fromkeys(report.missing))
        for name, tokens in read_q.items():
            self._replace_read_q(self.nodes[name], tokens)
        for rid in missing:
            if (entry := entries.get(rid)) is not None:
                hold = entry.prefill if group.role is Role.PREFILL else entry.decode
                if hold is not None and hold.engine.node.name in read_q:
                    self._add_unknown_read(hold)
        if group.role is Role.DECODE:
            self.by_total.fell(group)

    def _replace_load(self, engine: Engine, tok: int, seq: int, missing: Iterable[str]) -> None:
        before = engine.tok
        engine.epoch += 1
        engine.known_tok, engine.known_seq = tok, seq
        engine.tok, engine.seq = tok + engine.half_tok, seq + engine.half_seq
        for rid in missing:
            hold = engine.holds.get(rid)
            if hold is not None and hold.delivered and hold.epoch != engine.epoch:
                hold.epoch = engine.epoch
                engine.tok += hold.entry.tokens
                engine.seq += 1
        if engine.active:
            engine.group.tok += engine.tok - before

    @staticmethod
    def _replace_read_q(node: Node, tokens: int) -> None:
        node.epoch += 1
        node.read_q = node.known = tokens

    @staticmethod
    def _add_unknown_read(hold: Hold) -> None:
        node = hold.engine.node
        if hold.read and hold.read_epoch != node.epoch:
            hold.read_epoch = node.epoch
            node.read_q += hold.read

    @staticmethod
    def _refresh_free(engine: Engine) -> None:
        claimed = engine.promised if engine.promised > engine.used else engine.used
        free = engine.capacity - claimed if claimed < engine.capacity else 0
        if engine.active:
            engine.group.free += free - engine.free
        engine.free = free
