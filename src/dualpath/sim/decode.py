"""Decoding: one virtual clock per lockstep group (see ``nodes.DecodeGroup``), and write-back."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from dualpath.sim.build import REFERENCE_CONTEXT_TOKENS
from dualpath.sim.load import Agent, Stage
from dualpath.sim.nodes import DecodeEngine, DecodeGroup

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation

_CLOCK_SLACK = 1e-6
"""Steps; clocks are sums of many fractions."""


class DecodeSide:
    """All decode groups of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        engine, model = simulation.spec.engine, simulation.spec.model
        self._sim = simulation
        self._step_s = engine.decode_step_s
        # Attention is a GPU's own, experts are spread over the group: by their part of a token's
        # FLOPs the fullest GPU or the mean one counts.
        total = model.flops_at(REFERENCE_CONTEXT_TOKENS)
        spread = model.flops_base_per_token * (1.0 - engine.attention_share) / total
        self._spread, self._own = spread, 1.0 - spread
        self._per_request_s = engine.decode_step_per_request_s
        self._knee = engine.decode_knee_requests
        # From the knee on: by how much one request costs less than before.
        self._less_s = self._per_request_s - engine.decode_step_per_further_request_s
        self._start_s = engine.decode_start_s
        self._transfers = simulation.transfers
        self._link = simulation.spec.cluster.cnic_bytes_per_s
        self._loopback = simulation.spec.cluster.copies_on_cnic
        self._block = simulation.spec.block_tokens
        self._token_bytes = simulation.token_bytes

    # ---- a prompt arrives ----------------------------------------------------------------------

    def take_over(self, agent: Agent) -> None:
        """The prompt is computed and its KV is in the DE's buffer: persist what is new, copy it to
        HBM (P5, D5), then decode."""
        sim = self._sim
        now = sim.now_s
        de = agent.de
        assert de is not None
        if agent.gen <= 1:
            # The only token is the PE's; the DE has no more than the write-back to do.
            durable_s = self._persist(agent, now)
            if self._transfers:
                sim.staging.give_back_at(de.node, durable_s, agent.need_bytes)
            agent.t_second = now
            sim.end_round(agent, now, durable_s)
            return
        copied_s = now
        if self._transfers:
            self._persist_prompt(agent, now)
            if self._loopback:
                size = agent.prompt * self._token_bytes
                start = max(now, de.in_free_s, de.out_free_s)
                copied_s = de.in_free_s = de.out_free_s = start + size / self._link
            sim.staging.give_back_at(de.node, copied_s, agent.need_bytes)
        agent.stage = Stage.COPY
        sim.at(copied_s + self._start_s, self._join, agent)

    def _persist_prompt(self, agent: Agent, now: float) -> None:
        block = self._block
        new = agent.prompt // block * block - agent.hit
        if new:
            assert agent.de is not None
            agent.de.node.write(now, new * self._token_bytes)

    def _persist(self, agent: Agent, now: float) -> float:
        """Write-back of everything new of a round that is over; when it is durable."""
        if not self._transfers:
            return now
        assert agent.de is not None
        block = self._block
        new = agent.prompt // block * block - agent.hit
        return agent.de.node.write(now, new * self._token_bytes)

    # ---- decoding ------------------------------------------------------------------------------

    def _join(self, agent: Agent) -> None:
        if agent.stage is not Stage.COPY:
            return  # its node died meanwhile
        agent.stage = Stage.DECODE
        de = agent.de
        assert de is not None
        group = de.step_group
        now = self._sim.now_s
        self.advance(group)
        block = self._block
        # What the scheduler promised: prompt and answer in whole blocks.
        tokens = -(-(agent.prompt + agent.gen) // block) * block
        agent.need_bytes = float(tokens * self._token_bytes)
        de.hbm_bytes += agent.need_bytes
        if de.hbm_bytes > de.hbm_peak_bytes:
            de.hbm_peak_bytes = de.hbm_bytes
        seqs = de.seqs
        levels = group.levels
        levels[seqs] -= 1
        seqs = de.seqs = seqs + 1
        if seqs == len(levels):
            levels.append(1)
        else:
            levels[seqs] += 1
        group.seqs += 1
        if seqs > group.fullest:
            group.fullest = seqs
        self.retime(group)
        agent.t_second = now + group.step_s
        end = group.clock + agent.gen - 1
        heapq.heappush(group.ends, (end, self._sim.order(), agent))
        self.plan(group)

    def join(self, group: DecodeGroup, engine: DecodeEngine) -> None:
        """An idle engine joins a group."""
        self.advance(group)
        group.engines.append(engine)
        group.levels[0] += 1
        group.slowdown = 1.0 / min(one.speed for one in group.engines)
        engine.step_group = group
        if group.fullest:
            self.retime(group)
            self.plan(group)

    def advance(self, group: DecodeGroup) -> None:
        """Bring a group's clock up to now; before anything about the group changes."""
        now = self._sim.now_s
        if group.fullest:
            group.clock += (now - group.clock_s) / group.step_s
        group.clock_s = now

    def retime(self, group: DecodeGroup) -> None:
        """The length of a step has changed."""
        mean = group.seqs / len(group.engines)
        # As ``EngineCost.decode_added_s``, written out: nothing runs more often.
        requests = self._own * group.fullest + self._spread * mean
        step_s = self._step_s + self._per_request_s * requests
        if requests > self._knee:
            step_s -= self._less_s * (requests - self._knee)
        group.step_s = step_s * group.slowdown

    def plan(self, group: DecodeGroup) -> None:
        """Look again when the next request will have all its tokens."""
        if not group.ends:
            return
        when = self._sim.now_s + (group.ends[0][0] - group.clock) * group.step_s
        if when < group.wake_s:
            group.wake_s = when
            self._sim.at(when, self._look, group)

    def _look(self, group: DecodeGroup) -> None:
        """Let go of the requests that have all their tokens."""
        now = self._sim.now_s
        if group.wake_s > now:
            return  # planned anew since
        group.wake_s = math.inf
        self.advance(group)
        ends = group.ends
        limit = group.clock + _CLOCK_SLACK
        over: list[Agent] = []
        while ends and ends[0][0] <= limit:
            agent = heapq.heappop(ends)[2]
            assert agent.de is not None
            self.leave(agent.de, agent)
            over.append(agent)
        self.plan(group)
        for agent in over:
            self._end(agent, now)

    def leave(self, de: DecodeEngine, agent: Agent) -> None:
        """A request gives its place up; its group's clock must be up to date."""
        de.hbm_bytes -= agent.need_bytes
        group = de.step_group
        levels = group.levels
        seqs = de.seqs
        levels[seqs] -= 1
        de.seqs = seqs - 1
        levels[seqs - 1] += 1
        group.seqs -= 1
        if seqs == group.fullest and not levels[seqs]:
            group.fullest = seqs - 1
        self.retime(group)

    def _end(self, agent: Agent, now: float) -> None:
        durable_s = now
        if self._transfers:
            block = self._block
            # The KV of the last token is never computed.
            new = (agent.prompt + agent.gen - 1) // block - agent.prompt // block
            assert agent.de is not None
            durable_s = agent.de.node.write(now, new * block * self._token_bytes)
        self._sim.end_round(agent, now, durable_s)
