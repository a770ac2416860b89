"""Trials of a division by the simulator, which drives the live scheduler's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dualpath.plan.price import storage_bound
from dualpath.plan.search import Outcome
from dualpath.plan.traffic import Node
from dualpath.scheduler.settings import POLICY_SETS
from dualpath.sim.presets import preset
from dualpath.sim.run import simulate
from dualpath.sim.spec import SimSpec
from dualpath.workload.stats import TraceStats
from dualpath.workload.trace import Trajectory

_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Template:
    """A cluster but for its numbers of nodes.

    Attributes:
        model: model of a simulator preset, e.g. ``ds-660b``.
        mode: of the simulator.
        node: rates of every node.
        slo_ttft_s, slo_tpot_s: limits of the mean TTFT and the mean TPOT.
    """

    model: str
    mode: str
    node: Node
    slo_ttft_s: float
    slo_tpot_s: float

    def spec(self, prefill_nodes: int, decode_nodes: int) -> SimSpec:
        """The cluster with that many nodes.

        Raises:
            ValueError: model or mode is unknown.
        """
        base = preset(f"{self.model}-{prefill_nodes}p{decode_nodes}d", self.mode)
        gpus = self.node.gpus
        cluster = replace(
            base.cluster,
            gpus_per_node=gpus,
            snic_bytes_per_s=float(self.node.snic_gbs) * _GIGA,
            cnic_bytes_per_s=float(self.node.cnic_gbs) * _GIGA,
            prefill_lockstep=_lockstep(base.cluster.prefill_lockstep, base, gpus),
            decode_lockstep=_lockstep(base.cluster.decode_lockstep, base, gpus),
        )
        return replace(
            base, cluster=cluster, slo_ttft_s=self.slo_ttft_s, slo_tpot_s=self.slo_tpot_s
        )


def _lockstep(gpus: int, base: SimSpec, gpus_per_node: int) -> int:
    """The same number of nodes in step, of another size."""
    return gpus // base.cluster.gpus_per_node * gpus_per_node if gpus > 1 else 1


def ceiling_aps(spec: SimSpec, stats: TraceStats) -> float:
    """Agents a second that the storage NICs can feed, however fast everything else is.

    A run near its start may carry more for a while, since short contexts come first. Infinite where
    not all hits are read from storage (oracle, DRAM pools).
    """
    features, cluster = spec.features, spec.cluster
    if not features.transfers or features.pool_bytes_per_node:
        return math.inf
    named = POLICY_SETS.get(features.policy)
    path = features.policy.rsplit("/", 1)[-1] if named is None else named.read_path
    readers = 0 if path == "de_only" else cluster.prefill_nodes
    readers += 0 if path == "pe_only" else cluster.decode_nodes
    gbs = readers * cluster.snic_bytes_per_s / _GIGA
    return storage_bound(stats, spec.model.kv_bytes_per_token, gbs).agents_per_s


@dataclass(frozen=True, slots=True)
class SimulatedTrial:
    """Simulates a load online (``plan.search.Trial``); loads above the ceiling are refused unrun.

    Attributes:
        template: the cluster.
        trajectories: what agents do.
        stats: figures of the trajectories.
        seed: of arrivals.
        warmup_s, measure_s: see ``sim.run.simulate``. Where agents live longer than the warm-up
            the run is not yet as loaded as it would get, and its capacity comes out too high.
        report: told nodes, load and the part of the run that is done.
    """

    template: Template
    trajectories: Sequence[Trajectory]
    stats: TraceStats
    seed: int
    warmup_s: float
    measure_s: float
    report: Callable[[int, int, float, float], None] = lambda prefill, decode, aps, done: None

    def __call__(self, prefill_nodes: int, decode_nodes: int, aps: float) -> Outcome:
        """See ``plan.search.Trial``."""
        spec = self.template.spec(prefill_nodes, decode_nodes)
        stats = self.stats
        tokens_in = aps * stats.tokens_in / stats.trajectories
        tokens_out = aps * stats.tokens_out / stats.trajectories
        if aps > ceiling_aps(spec, stats):
            return Outcome(False, None, None, None, tokens_in, tokens_out)
        result = simulate(
            spec,
            self.trajectories,
            aps=aps,
            seed=self.seed,
            warmup_s=self.warmup_s,
            measure_s=self.measure_s,
            progress=lambda done, _: self.report(prefill_nodes, decode_nodes, aps, done),
        )
        return Outcome(
            slo_met=bool(result.slo_met) and not result.overloaded,
            ttft_s=None if result.ttft is None else result.ttft.mean,
            tpot_s=None if result.tpot is None else result.tpot.mean,
            jct_s=None if result.jct is None else result.jct.mean,
            tokens_in_per_s=tokens_in,
            tokens_out_per_s=tokens_out,
        )
