"""From the assignment to the prefill: host memory for the KV, then the reads.

A request takes the DE's buffer (the whole prompt will stand there) and then, for what the PE's side
reads, the PE's. Who holds both waits for nothing but its read and its step, so nobody waits for
somebody who waits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dualpath.config import Role
from dualpath.sim.load import Agent, Stage
from dualpath.sim.nodes import Node

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation


class Staging:
    """Buffers and reads of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._block = simulation.spec.block_tokens
        self._token_bytes = simulation.token_bytes
        self._transfers = simulation.transfers
        self._timeline = simulation.timeline
        self._window_s = simulation.window_s

    def assigned(self, agent: Agent) -> None:
        """Both engines and the read path of a request are known."""
        if not self._transfers:
            agent.t_allocated = self._sim.now_s
            self.read(agent)
            return
        assert agent.de is not None
        tokens = -(-agent.prompt // self._block) * self._block
        agent.need_bytes = float(tokens * self._token_bytes)
        self.claim(agent.de.node, agent, agent.need_bytes)

    def claim(self, node: Node, agent: Agent, size_bytes: float) -> None:
        """Ask for host memory on a node: first that of the DE, then that of the PE."""
        buffer = node.buffer
        if buffer.waiting or not buffer.take(self._sim.now_s, size_bytes):
            agent.stage = Stage.WAITS_DE if node.role is Role.DECODE else Stage.WAITS_PE
            buffer.waiting.append((size_bytes, agent))
            self._plan_wake(node)
        else:
            self._claimed(node, agent)

    def _claimed(self, node: Node, agent: Agent) -> None:
        staged = agent.pe_tokens - agent.pooled
        if node.role is Role.DECODE and staged:
            assert agent.pe is not None
            self.claim(agent.pe.node, agent, staged * self._token_bytes)
        else:
            agent.t_allocated = self._sim.now_s
            self.read(agent)

    def give_back(self, node: Node, size_bytes: float) -> None:
        """Host memory of a node is free again, now."""
        node.buffer.free += size_bytes
        if node.buffer.waiting:
            self._wake(node)

    def give_back_at(self, node: Node, when_s: float, size_bytes: float) -> None:
        """Host memory of a node will be free again."""
        node.buffer.release_at(when_s, size_bytes)
        if node.buffer.waiting:
            self._plan_wake(node)

    def _plan_wake(self, node: Node) -> None:
        releases = node.buffer.releases
        if releases and releases[0][0] < node.wake_s:
            node.wake_s = releases[0][0]
            self._sim.at(node.wake_s, self._wake_later, node)

    def _wake_later(self, node: Node) -> None:
        if node.wake_s <= self._sim.now_s:
            node.wake_s = math.inf
        self._wake(node)

    def _wake(self, node: Node) -> None:
        waiting = node.buffer.waiting
        while waiting and node.buffer.take(self._sim.now_s, waiting[0][0]):
            self._claimed(node, waiting.popleft()[1])
        if waiting:
            self._plan_wake(node)

    # ---- reads ---------------------------------------------------------------------------------

    def read(self, agent: Agent) -> None:
        """Queue the reads of the hit blocks; the PE gets the request when they are over."""
        now = end = self._sim.now_s
        assert agent.pe is not None and agent.de is not None
        for node, tokens in ((agent.pe.node, agent.pe_tokens), (agent.de.node, agent.de_tokens)):
            if node is agent.pe.node:
                tokens -= agent.pooled
            if not tokens:
                continue
            over = now
            if self._transfers:
                over = node.read(now, tokens * self._token_bytes, self._window_s)
                if self._timeline is not None:
                    size_s = tokens * self._token_bytes / node.rate
                    self._timeline.span(node.name, "SNIC read", agent.rid, over - size_s, over)
            node.reads.append((over, agent, agent.index))
            if over > end:
                end = over
        agent.t_read = end
        agent.stage = Stage.PREFILL
        self._sim.prefill.ready(agent, end)
