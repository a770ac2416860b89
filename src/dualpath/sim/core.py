"""The event loop and the agents' rounds. What happens in between has files of its own: ``fetch``,
``staging``, ``prefill``, ``decode``.

About four events a round: the arrival, a share of a fetch, a share of a prefill step, the start of
decoding and its end. Reads need none, because a first-come-first-served link knows when a transfer
will end the moment it is queued.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable
from typing import Final, TypeVar

from dualpath.scheduler import Request
from dualpath.sim.build import build_cluster, build_scheduler
from dualpath.sim.decode import DecodeSide
from dualpath.sim.failure import plan_failures
from dualpath.sim.fetch import Fetching
from dualpath.sim.load import Agent, Scripts, SharedBlocks, arrivals
from dualpath.sim.metrics import Metrics
from dualpath.sim.nodes import Event
from dualpath.sim.plan import Plan
from dualpath.sim.pool import Pools
from dualpath.sim.prefill import PrefillSide
from dualpath.sim.result import SimResult
from dualpath.sim.roles import RoleChanges
from dualpath.sim.spec import SimSpec
from dualpath.sim.staging import Staging
from dualpath.timeline import Timeline

Progress = Callable[[float, float], None]
PROGRESS_EVENTS: Final = 5_000
STEADY_EVENTS: Final = 500
SAMPLE: Final = 15
T = TypeVar("T")
R = TypeVar("R")


class Simulation:
    """One run. Single use, single thread; deterministic by the plan's seed.

    Attributes:
        now_s: simulated time.
        agents: those that are not over, by name.
        scheduler_s: CPU seconds inside the scheduler.
        token_bytes: KV bytes of a token.
    """

    def __init__(
        self,
        spec: SimSpec,
        scripts: Scripts,
        plan: Plan,
        window_s: float,
        progress: Progress | None,
        timeline: Timeline | None,
        decision_log: Callable[[str], object] | None,
    ) -> None:
        """Raises ValueError when there are no trajectories or ``window_s`` is not above 0."""
        if not window_s > 0:
            raise ValueError(f"window_s must be above 0, got {window_s}")
        self.spec: Final = spec
        self.plan: Final = plan
        self.window_s: Final = window_s
        self.timeline: Final = timeline
        self.token_bytes: Final = spec.model.kv_bytes_per_token
        self.transfers: Final = spec.features.transfers
        self.now_s = 0.0
        self.cluster: Final = build_cluster(spec)
        hit_ratio = scripts.hit_ratio(spec.block_tokens)
        self.scheduler: Final = build_scheduler(spec, self.cluster, hit_ratio, decision_log)
        self.metrics: Final = Metrics(spec, plan)
        self._progress = progress
        self._scripts = scripts
        self._arrivals = arrivals(plan, scripts)
        self._overhead_s: Final = spec.engine.request_overhead_s
        self._heap: list[Event] = []
        self._serial = 0
        self.agents: dict[str, Agent] = {}
        self._block = spec.block_tokens
        self.scheduler_s = 0.0
        self._calls = 0
        self._shared = SharedBlocks()
        pool_bytes = spec.features.pool_bytes_per_node
        self.pools: Final = (
            Pools(self.cluster.prefill.values(), pool_bytes, self.token_bytes)
            if pool_bytes
            else None
        )
        cluster = spec.cluster
        share = 1.0
        if spec.features.layerwise:
            share = min(1.0, spec.features.resident_layers / spec.model.num_layers)
        # The longest prompt that a PE can hold, and a DE's buffer.
        self.pe_hbm_tokens: Final = int(min(cluster.pe_hbm_bytes / share / self.token_bytes, 2**62))
        buffer_bytes = min(cluster.pe_buffer_bytes, cluster.de_buffer_bytes)
        self._longest = (
            min(self.pe_hbm_tokens, int(min(buffer_bytes / self.token_bytes, 2**62)))
            if spec.features.transfers
            else 2**62
        )
        self.fetching: Final = Fetching(self)
        self.staging: Final = Staging(self)
        self.prefill: Final = PrefillSide(self)
        self.decode: Final = DecodeSide(self)

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> SimResult:
        """Until nobody has anything left to do."""
        began = time.perf_counter()
        collecting = gc.isenabled()
        # Nothing here is part of a cycle, and looking for one costs a tenth of the time.
        gc.disable()
        try:
            events = self._loop()
        finally:
            if collecting:
                gc.enable()
        if not self.metrics.over:
            for agent in self.agents.values():  # no engine is left for them
                self.metrics.fail(agent)
        wall_s = time.perf_counter() - began
        return self.metrics.result(self, events, wall_s, self.scheduler_s)

    def _loop(self) -> int:
        plan_failures(self)
        if self.spec.roles is not None:
            RoleChanges(self, self.spec.roles).start()
        self._next_arrival()
        heap, pop, metrics = self._heap, heapq.heappop, self.metrics
        events = 0
        every = STEADY_EVENTS if self.plan.until_steady else PROGRESS_EVENTS
        while heap:
            now, _, handle, argument = pop(heap)
            self.now_s = now
            handle(argument)
            events += 1
            if not events % every:
                if self._progress is not None:
                    self._progress(metrics.part_done(now), now)
                if self.plan.steady:
                    metrics.check(now, self.agents.values())
                if metrics.over:
                    break
        return events

    def at(self, when_s: float, handle: Callable[..., None], argument: object) -> None:
        """Have ``handle(argument)`` called at ``when_s``; equal times: in order of the calls."""
        self._serial += 1
        heapq.heappush(self._heap, (when_s, self._serial, handle, argument))

    @property
    def busy(self) -> bool:
        """Whether anything else will happen."""
        return bool(self._heap) and not self.metrics.over

    def order(self) -> int:
        """A number that grows, to settle ties."""
        self._serial += 1
        return self._serial

    # ---- agents --------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.at(arrival[0] + self._overhead_s, self._arrive, arrival[1])

    def _arrive(self, number: int) -> None:
        script, synthetic = self._scripts.get(number)
        serial = self.metrics.agents
        self.metrics.agents += 1
        agent = Agent(serial, script, synthetic, self.now_s - self._overhead_s)
        self.agents[agent.rid] = agent
        self.submit(agent)
        self._next_arrival()

    def submit(self, agent: Agent) -> None:
        """The agent's next prompt, sent ``request_overhead_s`` ago, reaches the scheduler."""
        if self.metrics.over:
            return
        agent.begin(self._block, self.now_s - self._overhead_s, self._shared)
        self._queue(agent)

    def resubmit(self, rid: str) -> None:
        """A node died under this agent's round: it is sent again."""
        agent = self.agents[rid] = self.agents[rid].again()
        self._queue(agent)

    def _queue(self, agent: Agent) -> None:
        request = Request(agent.rid, agent.prompt, agent.hit, agent.gen, self._block)
        self._calls += 1
        if agent.prompt > self._longest:
            rejected = True
        elif self._calls & SAMPLE:
            rejected = self.scheduler.submit(request) is not None
        else:
            rejected = self._timed(self.scheduler.submit, request) is not None
        if rejected:
            self.metrics.fail(agent)
            del self.agents[agent.rid]
            return
        self.fetching.wake()

    def end_round(self, agent: Agent, answered_s: float, durable_s: float) -> None:
        """The round is over: the client has the answer, its blocks will be durable."""
        self._calls += 1
        if self._calls & SAMPLE:
            self.scheduler.finish(agent.rid)
        else:
            self._timed(self.scheduler.finish, agent.rid)
        self.metrics.round_done(agent, answered_s)
        if agent.shares:
            self._shared.add(agent.script, agent.index, agent.prompt)
        latency = agent.end()
        if latency is None:
            self.metrics.agent_done(agent, answered_s)
            del self.agents[agent.rid]
            if self.pools is not None:
                self.pools.forget(agent)
        else:
            # The end of a turn is reported once its blocks are durable, so that the next one
            # hits them.
            self.at(durable_s + latency + self._overhead_s, self.submit, agent)

    def prefilled(self, agent: Agent) -> None:
        """The PE is done with the request."""
        self._calls += 1
        if self._calls & SAMPLE:
            self.scheduler.prefill_done(agent.rid)
        else:
            self._timed(self.scheduler.prefill_done, agent.rid)
        self.metrics.first_token(agent)
        if self.pools is not None:
            assert agent.pe is not None
            self.pools.leave(agent, agent.pe)

    def _timed(self, call: Callable[[T], R], argument: T) -> R:
        """One of ``SAMPLE + 1`` calls of the scheduler that are too short and too many to time."""
        began = time.thread_time()
        answer = call(argument)
        self.scheduler_s += (time.thread_time() - began) * (SAMPLE + 1)
        return answer
