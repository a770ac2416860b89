"""Fetches: every group's leader asks the scheduler for work once an interval, while some waits."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from dualpath.config import Role
from dualpath.scheduler import Assignment
from dualpath.sim.nodes import FetchGroup

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation


class Fetching:
    """The fetch groups of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        cluster = simulation.cluster
        self._sim = simulation
        self._interval = simulation.spec.fetch_interval_s
        self._idle: dict[Role, list[FetchGroup]] = {
            Role.PREFILL: list(cluster.prefill_fetch),
            Role.DECODE: list(cluster.decode_fetch),
        }
        self._told = [*cluster.prefill_fetch, *cluster.decode_fetch]

    def wake(self) -> None:
        """Work waits: every group will fetch, at its next turn."""
        for groups in self._idle.values():
            if groups:
                for group in groups:
                    self._plan(group)
                groups.clear()

    def _plan(self, group: FetchGroup) -> None:
        interval = self._interval
        turn = math.floor((self._sim.now_s - group.phase_s) / interval) + 1
        when = group.phase_s + turn * interval
        if when <= self._sim.now_s:
            when += interval
        group.planned = True
        self._sim.at(when, self._fetch, group)

    def add(self, group: FetchGroup) -> None:
        """A group joins; it fetches at its next turn, in case work waits."""
        self._told.append(group)
        self._plan(group)

    def drop(self, group: FetchGroup) -> None:
        """None of its nodes is left."""
        self._told.remove(group)
        idle = self._idle[group.role]
        if group in idle:
            idle.remove(group)

    def _fetch(self, group: FetchGroup) -> None:
        if not group.nodes:
            return
        now = self._sim.now_s
        scheduler = self._sim.scheduler
        self._tell(now)
        began = time.thread_time()
        decisions = scheduler.fetch(group.name, (), now)
        self._sim.scheduler_s += time.thread_time() - began
        for assignment in decisions.assigned:
            self._assign(assignment)
        for rejection in decisions.rejected:
            self._sim.metrics.fail(self._sim.agents.pop(rejection.rid))
        waiting = (
            scheduler.waiting_prefill
            if group.role is Role.PREFILL
            else scheduler.waiting_decode(group.name)
        )
        if waiting:
            self._plan(group)
        else:
            group.planned = False
            self._idle[group.role].append(group)

    def _tell(self, now: float) -> None:
        """Nodes whose last report is an interval old report what they have read since.

        Every group reports once an interval, whether or not work waits for it.
        """
        oldest = now - self._interval
        told = self._told
        if not told or told[0].told_s > oldest:
            return
        done = self._sim.scheduler.read_done
        began = time.thread_time()
        count = 0
        for group in told:
            if group.told_s > oldest:
                break
            count += 1
            group.told_s = now
            for node in group.nodes:
                reads = node.reads
                while reads and reads[0][0] <= now:
                    _, agent, index = reads.popleft()
                    if agent.index == index:  # else that round is over
                        done(agent.rid, group.role)
        self._told = told[count:] + told[:count]
        self._sim.scheduler_s += time.thread_time() - began

    def _assign(self, assignment: Assignment) -> None:
        agent = self._sim.agents[assignment.rid]
        agent.pe = self._sim.cluster.prefill[assignment.prefill]
        agent.de = self._sim.cluster.decode[assignment.decode]
        agent.t_assigned = self._sim.now_s
        plan = assignment.read
        agent.pe_tokens, agent.de_tokens = plan.prefill_tokens, plan.decode_tokens
        if self._sim.pools is not None:
            agent.pe, agent.pooled = self._sim.pools.route(agent, agent.pe)
        self._sim.staging.assigned(agent)
