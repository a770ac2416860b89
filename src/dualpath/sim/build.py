"""From a ``SimSpec`` to nodes, engines, groups and the scheduler that knows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from dualpath.config import Role
from dualpath.scheduler import EngineSpec, Scheduler, SchedulerSettings
from dualpath.scheduler.decision_log import LoggedScheduler
from dualpath.sim.nodes import (
    DecodeEngine,
    DecodeGroup,
    FetchGroup,
    Node,
    PrefillEngine,
    PrefillGroup,
)
from dualpath.sim.spec import ClusterSpec, SimSpec

T = TypeVar("T")
ALPHA_S: Final = 3.0
BETA_S: Final = 5.0
REFERENCE_CONTEXT_TOKENS: Final = 32_768
"""Context at which the rate behind beta is taken."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything there is. Engines by name, as the scheduler names them."""

    nodes: list[Node]
    prefill: dict[str, PrefillEngine]
    decode: dict[str, DecodeEngine]
    prefill_groups: tuple[PrefillGroup, ...]
    decode_groups: tuple[DecodeGroup, ...]
    prefill_fetch: tuple[FetchGroup, ...]
    decode_fetch: tuple[FetchGroup, ...]


def build_cluster(spec: SimSpec) -> Cluster:
    """Nodes and engines, all idle."""
    cluster = spec.cluster
    nodes: list[Node] = []
    for role, names, buffer_bytes in (
        (Role.PREFILL, cluster.prefill_names, cluster.pe_buffer_bytes),
        (Role.DECODE, cluster.decode_names, cluster.de_buffer_bytes),
    ):
        for name in names:
            rate = cluster.snic_bytes_per_s * cluster.snic_scale.get(name, 1.0)
            nodes.append(Node(name, len(nodes), role, rate, buffer_bytes))
    prefill: list[PrefillEngine] = []
    decode: list[DecodeEngine] = []
    for node in nodes:
        speed = cluster.compute_scale.get(node.name, 1.0)
        for local in range(cluster.gpus_per_node):
            name = f"{node.name}-{local}"
            if node.role is Role.PREFILL:
                prefill.append(PrefillEngine(name, node, speed))
            else:
                decode.append(DecodeEngine(name, node, speed))
    prefill_nodes = nodes[: cluster.prefill_nodes]
    decode_nodes = nodes[cluster.prefill_nodes :]
    fetch: dict[Role, list[list[Node]]] = {
        Role.PREFILL: chunks(prefill_nodes, _fetch_nodes(cluster, cluster.prefill_lockstep)),
        Role.DECODE: chunks(decode_nodes, _fetch_nodes(cluster, cluster.decode_lockstep)),
    }
    groups: dict[Role, list[FetchGroup]] = {role: [] for role in Role}
    for role, parts in fetch.items():
        # Leaders do not fetch in step: those of a role are spread over the whole interval, because
        # the first to fetch after a pause gets all that came in it.
        first = 0.0 if role is Role.PREFILL else 0.5
        for index, part in enumerate(parts):
            phase_s = spec.fetch_interval_s * (index + first) / len(parts)
            groups[role].append(FetchGroup(f"{role.value}-{index}", role, part, phase_s))
    return Cluster(
        nodes=nodes,
        prefill={engine.name: engine for engine in prefill},
        decode={engine.name: engine for engine in decode},
        prefill_groups=tuple(
            PrefillGroup(f"PE group {index}", part)
            for index, part in enumerate(chunks(prefill, cluster.prefill_lockstep))
        ),
        decode_groups=tuple(
            DecodeGroup(f"DE group {index}", part)
            for index, part in enumerate(chunks(decode, cluster.decode_lockstep))
        ),
        prefill_fetch=tuple(groups[Role.PREFILL]),
        decode_fetch=tuple(groups[Role.DECODE]),
    )


def build_scheduler(
    spec: SimSpec,
    cluster: Cluster,
    hit_ratio: float,
    write: Callable[[str], object] | None,
) -> Scheduler:
    """The scheduler of that cluster, the one that the front runs.

    Args:
        spec, cluster: what it schedules for.
        hit_ratio: of the workload, for beta (``Profile.beta_tokens`` is the same formula).
        write: gets a decision log.
    """
    settings = SchedulerSettings(
        alpha_tokens=alpha_tokens(spec) if spec.alpha_tokens is None else spec.alpha_tokens,
        beta_tokens=beta_tokens(spec, hit_ratio) if spec.beta_tokens is None else spec.beta_tokens,
        z_factor=spec.z_factor,
        policy=spec.features.policy,
    )
    scheduler = Scheduler(settings) if write is None else LoggedScheduler(settings, write)
    for prefill in cluster.prefill.values():
        scheduler.add_engine(engine_spec(spec, prefill))
    for decode in cluster.decode.values():
        scheduler.add_engine(engine_spec(spec, decode))
    return scheduler


def engine_spec(spec: SimSpec, engine: PrefillEngine | DecodeEngine) -> EngineSpec:
    """How the scheduler is told of an engine."""
    node, token_bytes = engine.node, spec.model.kv_bytes_per_token
    rate = node.rate / token_bytes
    return EngineSpec(
        engine.name,
        node.role,
        node.fetch_group.name,
        node.name,
        int(spec.cluster.de_hbm_bytes / token_bytes) if node.role is Role.DECODE else 0,
        rate if math.isfinite(rate) else 0.0,
    )


def alpha_tokens(spec: SimSpec) -> int:
    """Tokens that a SNIC reads in 3 s (arXiv 2602.21548, A.4)."""
    rate = spec.cluster.snic_bytes_per_s / spec.model.kv_bytes_per_token
    return int(min(ALPHA_S * rate, 2**62))


def beta_tokens(spec: SimSpec, hit_ratio: float) -> int:
    """Tokens, hit and miss, that a GPU processes in 5 s (A.4)."""
    return int(BETA_S * miss_tokens_per_s(spec) / max(1.0 - hit_ratio, 1e-3))


def miss_tokens_per_s(spec: SimSpec) -> float:
    """Tokens that a GPU computes a second."""
    return spec.engine.flops_per_s / spec.model.flops_at(REFERENCE_CONTEXT_TOKENS)


def _fetch_nodes(cluster: ClusterSpec, lockstep: int) -> int:
    if cluster.one_fetch_group:
        return cluster.prefill_nodes + cluster.decode_nodes
    return max(1, -(-lockstep // cluster.gpus_per_node))


def chunks(items: list[T], size: int) -> list[list[T]]:
    """Parts of ``size`` items; the last may be smaller."""
    return [items[at : at + size] for at in range(0, len(items), size)]
