"""Prefill steps: what a lockstep group computes together, and how long that takes.

A step in closed form, never layer by layer. With c seconds of computation and x seconds of
transfers, both spread evenly over n layers and overlapped, a step takes
``max(c, x) + min(c, x) / n`` (a pipeline of two stages); without overlap the copies come before and
after.
"""

from __future__ import annotations

import heapq
import math
from itertools import islice
from typing import TYPE_CHECKING, Final

from dualpath.scheduler.attention_time import AttentionTimeModel
from dualpath.scheduler.batch import cut_batch
from dualpath.sim.load import Agent
from dualpath.sim.nodes import PrefillEngine, PrefillGroup

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation

_FIRST_LOOK: Final = 16
_LONGEST_LOOK: Final = 512


class PrefillSide:
    """All prefill groups of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        spec = simulation.spec
        model, engine = spec.model, spec.engine
        self._sim = simulation
        self._rate = engine.flops_per_s
        self._fixed_s = engine.prefill_step_s
        self._layers = model.num_layers
        self._local = model.flops_base_per_token * engine.attention_share
        self._spread = model.flops_base_per_token - self._local
        self._per_context = float(model.flops_per_token_per_context)
        self._capped = tuple(part for part in model.attention if part.cap_tokens is not None)
        self._cap = max((part.cap_tokens or 0 for part in self._capped), default=0)
        self._at_cap = float(sum(part.flops_at(self._cap) for part in self._capped))
        self._layerwise = spec.features.layerwise
        self._transfers = spec.features.transfers
        self._quota_s = spec.quota_s if spec.features.quota else math.inf
        self._max_tokens = spec.quota_step_tokens if spec.features.quota else spec.max_step_tokens
        self._hbm_tokens = simulation.pe_hbm_tokens if self._transfers else 2**62
        self._link = spec.cluster.cnic_bytes_per_s
        self._loopback = spec.cluster.copies_on_cnic
        self._token_bytes = simulation.token_bytes
        self._quota_models: dict[float, AttentionTimeModel] = {}

    # ---- coming in -----------------------------------------------------------------------------

    def ready(self, agent: Agent, when_s: float) -> None:
        """The hit blocks of a request will have been read at ``when_s``."""
        assert agent.pe is not None
        group = agent.pe.step_group
        heapq.heappush(group.ready, (when_s, self._sim.order(), agent))
        if not group.busy and when_s < group.wake_s:
            self._plan_look(group, when_s)

    def join(self, group: PrefillGroup, engine: PrefillEngine) -> None:
        """An engine takes part from the group's next step on."""
        group.engines.append(engine)
        group.speed += engine.speed
        engine.step_group = group

    def _plan_look(self, group: PrefillGroup, when_s: float) -> None:
        group.wake_s = when_s
        self._sim.at(when_s, self._look, group)

    def _look(self, group: PrefillGroup) -> None:
        """Start a step if the group has none and somebody is ready."""
        now = self._sim.now_s
        if group.wake_s <= now:
            group.wake_s = math.inf
        if group.busy:
            return
        ready = group.ready
        while ready and ready[0][0] <= now:
            agent = heapq.heappop(ready)[2]
            assert agent.pe is not None
            agent.pe.queue.append(agent)
            group.queued += 1
        if group.queued:
            self._start(group, now)
        elif ready:
            self._plan_look(group, ready[0][0])

    # ---- a step --------------------------------------------------------------------------------

    def _start(self, group: PrefillGroup, now: float) -> None:
        group.busy = True
        batch = group.batch
        token_bytes, link, rate = self._token_bytes, self._link, self._rate
        busiest_s = attention_sum_s = spread_flops = 0.0
        before_s = after_s = 0.0  # serial copies
        links_free = now
        for engine in group.engines:
            if not engine.queue:
                continue
            flops = 0.0
            tokens_in = tokens_out = 0
            for agent, count in self._cut(engine):
                batch.append((engine, agent, count))
                cached = agent.prompt - agent.left
                flops += self._attention_flops(cached, count)
                spread_flops += self._spread * count
                if not self._transfers:
                    continue
                # P2 or D2: all KV so far comes to the GPU; P4 or D4: what is new on the DE's side
                # goes out. What lies in this node's memory passes the CNIC both ways.
                first = cached == agent.hit
                remote = agent.de_tokens
                local = cached - remote
                new = count + agent.pe_tokens if first else count
                if self._loopback:
                    tokens_in += cached
                    # Copied one after the other, a loopback's way out is over with its way in.
                    tokens_out += local + new if self._layerwise else new
                else:
                    tokens_in += remote
                    tokens_out += new
                assert agent.de is not None
                free = agent.de.in_free_s
                free = (free if free > now else now) + new * token_bytes / link
                agent.de.in_free_s = free
                if free > links_free:
                    links_free = free
                if remote:
                    free = agent.de.out_free_s
                    free = (free if free > now else now) + remote * token_bytes / link
                    agent.de.out_free_s = free
                    if free > links_free:
                        links_free = free
            attention_s = flops / (rate * engine.speed)
            attention_sum_s += attention_s
            if attention_s > busiest_s:
                busiest_s = attention_s
            in_s, out_s = tokens_in * token_bytes / link, tokens_out * token_bytes / link
            if in_s > before_s:
                before_s = in_s
            if out_s > after_s:
                after_s = out_s
        compute_s = busiest_s + spread_flops / (rate * group.speed)
        if not self._layerwise:
            moving = before_s + compute_s + after_s
        else:
            copy_s = max(before_s, after_s, links_free - now)
            moving = max(compute_s, copy_s) + min(compute_s, copy_s) / self._layers
        end = now + self._fixed_s + moving
        if len(group.engines) > 1:
            mean_s = attention_sum_s / len(group.engines)
            self._sim.metrics.step(now, end, busiest_s, mean_s)
        timeline = self._sim.timeline
        if timeline is not None:
            args = {"requests": len(batch), "tokens": sum(count for _, _, count in batch)}
            timeline.span("prefill", group.name, "step", now, end, args)
        self._sim.at(end, self._finish, group)

    def _finish(self, group: PrefillGroup) -> None:
        group.busy = False
        batch, group.batch = group.batch, []
        for engine, agent, count in batch:
            agent.left -= count
            if not agent.left:
                # First in line, unless a failure took those before it out of the step.
                engine.queue.remove(agent)
                group.queued -= 1
                self._done(agent)
        self._look(group)

    def _done(self, agent: Agent) -> None:
        """The prompt is computed: the first token is there."""
        sim = self._sim
        agent.t_first = sim.now_s
        assert agent.pe is not None
        sim.prefilled(agent)
        staged = agent.pe_tokens - agent.pooled
        if staged and self._transfers:
            sim.staging.give_back(agent.pe.node, staged * self._token_bytes)
        sim.decode.take_over(agent)

    # ---- what a step takes ---------------------------------------------------------------------

    def _cut(self, engine: PrefillEngine) -> list[tuple[Agent, int]]:
        """Requests of an engine's next step, and the tokens each computes."""
        queue = engine.queue
        look = _FIRST_LOOK
        while True:
            agents: list[Agent] = []
            pending: list[tuple[int, int]] = []
            room = self._hbm_tokens
            for agent in islice(queue, look):
                prompt, left = agent.prompt, agent.left
                room -= prompt
                if room < 0 and agents:
                    break
                agents.append(agent)
                pending.append((prompt - left, left))
            counts = cut_batch(
                pending, self._quota_s, self._quota_model(engine.speed), self._max_tokens
            )
            all_taken = len(agents) == look < len(queue) and counts[-1] == pending[-1][1]
            if not all_taken or look >= _LONGEST_LOOK:
                return [
                    (agent, count) for agent, count in zip(agents, counts, strict=True) if count
                ]
            look = min(look * 4, _LONGEST_LOOK)

    def _attention_flops(self, cached: int, count: int) -> float:
        flops = self._local * count + self._per_context * (
            count * cached + count * (count + 1) * 0.5
        )
        if cached >= self._cap:
            return flops + self._at_cap * count
        return flops + sum(part.flops(cached, count) for part in self._capped)

    def _quota_model(self, speed: float) -> AttentionTimeModel:
        """What ``profile`` would fit on such a GPU."""
        model = self._quota_models.get(speed)
        if model is None:
            rate = self._rate * speed
            per_context = self._per_context / rate
            token_s = (self._local + self._at_cap) / rate
            model = AttentionTimeModel(0.0, token_s, 0.0, per_context, per_context / 2)
            self._quota_models[speed] = model
        return model
