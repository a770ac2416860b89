"""Counts a run as it goes: arrays and sums, nothing per request that is not asked for."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING, Final

from dualpath.config import Role
from dualpath.sim.load import Agent
from dualpath.sim.plan import Plan
from dualpath.sim.result import SPLIT, Samples, SimResult, Steps, Windows
from dualpath.sim.spec import SimSpec
from dualpath.sim.steady import BEFORE_S, WINDOW_S, End, SteadyRule
from dualpath.workload.measure import Spread

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation

ATTENTION_PART: Final = 0.05
"""Of a run, over which the balance of attention is taken (arXiv 2602.21548 does so)."""
_RECENT: Final = 200
_GIVE_UP: Final = 10.0
_NAN: Final = math.nan


class Metrics:
    """Figures of one run.

    Attributes:
        agents: arrived so far.
        over: nothing that happens later is measured, or the run was given up.
    """

    def __init__(self, spec: SimSpec, plan: Plan) -> None:
        self._spec = spec
        self._plan = plan
        self.agents = 0
        self.agents_done = 0
        self.failed = 0
        self.requests = 0
        self.over = False
        self.overloaded = False
        self.role_switches: list[tuple[float, str, str]] = []
        self.end: End | None = None
        self._rule = SteadyRule(spec.slo_ttft_s) if plan.until_steady else None
        timed = plan.steady and self._rule is None
        self._from_s = plan.warmup_s if timed else 0.0
        self._until_s = plan.warmup_s + plan.measure_s if timed else math.inf
        self._pending = 0  # measured requests under way
        self._tokens_in = self._tokens_out = self._hits = self._computed = self._pooled = 0
        self._paths = {"pe": 0, "de": 0, "split": 0}
        self._jct = array("d")
        self._submit, self._ttft, self._answered = array("d"), array("d"), array("d")
        self._ttst, self._tpot = array("d"), array("d")
        self._split = {name: array("d") for name in SPLIT}
        self._parts = tuple(self._split[name] for name in SPLIT)
        self._step_start, self._step_end = array("d"), array("d")
        self._step_busiest, self._step_mean = array("d"), array("d")
        self._recent_s = spec.slo_ttft_s
        self._live_tokens = 0  # context of agents that are not over
        self._live_peak = 0
        self._live_at_s = self._from_s
        self._live_sum = 0.0
        self._end_s = 0.0

    @property
    def mean_gen(self) -> float:
        """Mean answer so far, in tokens."""
        return self._tokens_out / self.requests if self.requests else 0.0

    # ---- as it happens -------------------------------------------------------------------------

    def step(self, start_s: float, end_s: float, busiest_s: float, mean_s: float) -> None:
        """A prefill step of a lockstep group."""
        self._step_start.append(start_s)
        self._step_end.append(end_s)
        self._step_busiest.append(busiest_s)
        self._step_mean.append(mean_s)

    def first_token(self, agent: Agent) -> None:
        """A round's first token is there."""
        if self._rule is not None:
            self._rule.first_token(agent.t_first, agent.t_first - agent.t_submit)

    def round_done(self, agent: Agent, answered_s: float) -> None:
        """A round was answered."""
        self.requests += 1
        hit, prompt, gen = agent.hit, agent.prompt, agent.gen
        self._tokens_in += prompt
        self._tokens_out += gen
        self._hits += hit
        self._computed += prompt - hit
        self._pooled += agent.pooled
        paths = self._paths
        on_pe, on_de = agent.pe_tokens, agent.de_tokens
        paths["pe"] += on_pe
        paths["de"] += on_de
        if on_pe and on_de:
            paths["split"] += hit
        self._live(prompt + gen - agent.context, answered_s)
        self._end_s = answered_s
        submit = agent.t_submit
        if not self._from_s <= submit < self._until_s:
            return
        ttft = agent.t_first - submit
        self._submit.append(submit)
        self._ttft.append(ttft)
        if self._rule is not None:
            self._answered.append(answered_s)
        self._ttst.append(agent.t_second - agent.t_first if gen > 1 else _NAN)
        self._tpot.append((answered_s - agent.t_second) / (gen - 2) if gen > 2 else _NAN)
        schedule, allocate, read, prefill = self._parts
        schedule.append(agent.t_assigned - submit)
        allocate.append(agent.t_allocated - agent.t_assigned)
        read.append(agent.t_read - agent.t_allocated)
        prefill.append(agent.t_first - agent.t_read)
        if self._plan.steady:
            self._recent_s += (ttft - self._recent_s) / _RECENT

    def agent_done(self, agent: Agent, answered_s: float) -> None:
        """An agent has had its last answer."""
        self.agents_done += 1
        if self._from_s <= answered_s < self._until_s:
            self._jct.append(answered_s - agent.arrived_s)
        self._live(-(agent.prompt + agent.gen), answered_s)

    def fail(self, agent: Agent) -> None:
        """A round can never be served; its agent is over."""
        self.failed += 1
        self._live(-agent.context, agent.t_submit)

    def _live(self, tokens: int, now_s: float) -> None:
        if now_s > self._live_at_s:
            self._live_sum += self._live_tokens * (now_s - self._live_at_s)
            self._live_at_s = now_s
        self._live_tokens += tokens
        if self._live_tokens > self._live_peak:
            self._live_peak = self._live_tokens

    def part_done(self, now_s: float) -> float:
        """How much of the run is done, 0 .. 1."""
        if self._rule is not None:
            return min(0.99, now_s / (2 * BEFORE_S))  # nobody knows when it will be steady
        if self._plan.steady:
            return min(1.0, now_s / self._until_s)
        return self.agents_done / max(1, self._plan.agents or self.agents)

    def check(self, now_s: float, agents: Iterable[Agent]) -> None:
        """Whether a steady run is over: everything measured is answered, or it is given up.

        O(agents that are not over).
        """
        longest_s = 0.0
        measured = False
        for agent in agents:
            submit_s = agent.t_submit
            if submit_s < self._until_s:
                measured = True
            if agent.left and now_s - submit_s > longest_s:
                longest_s = now_s - submit_s
        if now_s >= self._until_s and not measured:
            self.over = True
        if self._rule is not None and (end := self._rule.end(now_s)) is not None:
            self.over, self.end = True, end
            self.overloaded = end is not End.STEADY
            self._until_s = now_s
            return
        waited_s = max(self._recent_s, longest_s)
        if now_s > self._from_s and waited_s > _GIVE_UP * self._spec.slo_ttft_s:
            self.over = self.overloaded = True
            if self._rule is not None:
                self.end = End.EXCEEDED

    # ---- afterwards ----------------------------------------------------------------------------

    def result(
        self, simulation: Simulation, events: int, wall_s: float, scheduler_s: float
    ) -> SimResult:
        """Everything, now that the run is over."""
        end_s = self._end_s
        if self._rule is not None:
            self._keep_last_window(end_s)
        nodes = simulation.cluster.nodes
        windows = Windows(simulation.window_s, {node.name: node.window for node in nodes})
        steps = Steps(self._step_start, self._step_end, self._step_busiest, self._step_mean)
        jct = Spread.of(self._jct)
        # Offline, agents run out: the tail begins when half of them are over.
        offline = self._plan.aps is None
        ratios = windows.max_over_mean(jct.p50 if offline and jct is not None else end_s)
        ttft, ttst, tpot = Spread.of(self._ttft), _spread(self._ttst), _spread(self._tpot)
        slo_met: bool | None = None
        if self._plan.aps is not None:
            slo_met = (
                not self.overloaded
                and not self.failed
                and ttft is not None
                and ttft.mean <= self._spec.slo_ttft_s
                and (tpot is None or tpot.mean <= self._spec.slo_tpot_s)
            )
        live_s = self._live_at_s - self._from_s
        token_bytes = simulation.token_bytes
        return SimResult(
            name=self._spec.name,
            mode=self._spec.features.name,
            seed=self._plan.seed,
            agents=self.agents,
            agents_done=self.agents_done,
            requests=self.requests,
            failed=self.failed,
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            hit_tokens=self._hits,
            computed_tokens=self._computed,
            duration_s=end_s,
            jct=jct,
            ttft=ttft,
            ttst=ttst,
            tpot=tpot,
            ttft_split={
                name: spread
                for name, values in self._split.items()
                if (spread := Spread.of(values)) is not None
            },
            snic={node.name: node.read_bytes for node in nodes},
            snic_written={
                node.name: node.written_bytes for node in nodes if node.role is Role.DECODE
            },
            path={name: float(tokens * token_bytes) for name, tokens in self._paths.items()},
            snic_max_over_mean=sum(ratios) / len(ratios) if ratios else None,
            attention_max_over_mean=steps.max_over_mean(end_s * ATTENTION_PART),
            working_set_bytes=self._live_sum / live_s * token_bytes if live_s > 0 else 0.0,
            working_set_peak_bytes=float(self._live_peak * token_bytes),
            pool_hit_tokens=self._pooled,
            slo_met=slo_met,
            end=self.end,
            overloaded=self.overloaded,
            role_switches=tuple(self.role_switches),
            scheduler_cpu_s=scheduler_s,
            events=events,
            wall_s=wall_s,
            windows=windows,
            steps=steps,
            samples=Samples(self._submit, self._ttft, self._ttst, self._tpot, self._split),
        )

    def _keep_last_window(self, end_s: float) -> None:
        """Requests answered in the last window of a run until it is steady are what counts."""
        kept = [at_s > end_s - WINDOW_S for at_s in self._answered]

        def only(values: array[float]) -> array[float]:
            return array("d", compress(values, kept))

        self._submit, self._ttft = only(self._submit), only(self._ttft)
        self._ttst, self._tpot = only(self._ttst), only(self._tpot)
        self._split = {name: only(values) for name, values in self._split.items()}


def _spread(values: array[float]) -> Spread | None:
    """Of the values that are numbers."""
    return Spread.of([value for value in values if value == value])
