"""From the description of a live cluster and what was measured on it to a simulation of it.

The cluster file says which nodes there are, what their NICs and buffers are limited to and how the
scheduler is set; how fast its engines are must have been measured on them (``MeasuredCosts``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from dualpath.config import ClusterConfig, Mode, NodeConfig, Role
from dualpath.model import ModelCost
from dualpath.model.describe import cost_from_config_json
from dualpath.scheduler import SchedulerSettings
from dualpath.scheduler.profile import Profile
from dualpath.sim.core import Progress
from dualpath.sim.result import SimResult
from dualpath.sim.run import simulate
from dualpath.sim.spec import MODES, ClusterSpec, EngineCost, Features, SimSpec
from dualpath.workload.trace import Trajectory

_FETCH_S: Final = 0.002
"""The front looks for engines the moment a request arrives, not at a group's next turn."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What one engine of a live cluster was measured to need, while the others worked too.

    Attributes:
        prefill_tokens_per_s: miss tokens that a PE computes a second, its fixed time left out.
        decode_step_s: a decode step of one request.
        decode_step_per_request_s: what every request adds to a step.
        prefill_step_s: fixed time of a prefill step.
        decode_start_s: from the prompt's KV being with the DE to its first decode step.
        request_overhead_s: from the client's sending a request to its standing in the queue, and
            what else every request costs beside its steps and transfers.
        context_tokens: tokens before those whose rate ``prefill_tokens_per_s`` is.
        snic_bytes_per_s: measured rate of a node's storage NIC, by node; for others the cluster
            file's limit is taken.
        cnic_bytes_per_s: measured rate of an engine's compute NIC, each way; None: the limit.

    Raises:
        ValueError: a figure is out of range; the message names it.
    """

    prefill_tokens_per_s: float
    decode_step_s: float
    decode_step_per_request_s: float = 0.0
    prefill_step_s: float = 0.0
    decode_start_s: float = 0.0
    request_overhead_s: float = 0.0
    context_tokens: int = 0
    snic_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    cnic_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.prefill_tokens_per_s < math.inf:
            raise ValueError(
                f"prefill_tokens_per_s must be above 0 and finite, got {self.prefill_tokens_per_s}"
            )
        if not 0 < self.decode_step_s < math.inf:
            raise ValueError(f"decode_step_s must be above 0 and finite, got {self.decode_step_s}")
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens must not be negative, got {self.context_tokens}")
        rates = {f"snic_bytes_per_s of {name}": one for name, one in self.snic_bytes_per_s.items()}
        if self.cnic_bytes_per_s is not None:
            rates["cnic_bytes_per_s"] = self.cnic_bytes_per_s
        for name, rate in rates.items():
            if not rate > 0:
                raise ValueError(f"{name} must be above 0, got {rate}")


def predict(
    config: ClusterConfig,
    costs: MeasuredCosts,
    trajectories: Iterable[Trajectory],
    *,
    mode: Mode | None = None,
    policy: str = "",
    profile: Profile | None = None,
    agents: int | None = None,
    aps: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> SimResult:
    """How a live cluster would serve these agents. ``to_json`` of the result has replay's keys.

    Args:
        config, costs, mode, policy, profile: see ``live_spec``.
        trajectories, agents, aps, seed, progress: see ``run.simulate``.

    Raises:
        ValueError, UnsupportedModel: see ``live_spec`` and ``run.simulate``.
    """
    spec = live_spec(config, costs, mode=mode, policy=policy, profile=profile)
    return simulate(spec, trajectories, agents=agents, aps=aps, seed=seed, progress=progress)


def live_spec(
    config: ClusterConfig,
    costs: MeasuredCosts,
    *,
    mode: Mode | None = None,
    policy: str = "",
    profile: Profile | None = None,
) -> SimSpec:
    """The cluster as a simulation.

    Args:
        config: its description; ``model.path`` must be a folder with a ``config.json``.
        costs: of its engines.
        mode: another one than the file's.
        policy: of the scheduler; empty for the file's, or for another mode than the file's that
            mode's own.
        profile: measured thresholds, which replace those of the file; without it batches are not
            cut by attention time, as in the live system.

    Raises:
        ValueError: nodes differ in what the simulator has one figure for, or a name is no node.
        UnsupportedModel: the model's costs are not known.
    """
    described = config.scheduler
    if mode is not None and mode is not config.mode:
        described = msgspec.structs.replace(described, policy="")
    mode = config.mode if mode is None else mode
    if policy:
        described = msgspec.structs.replace(described, policy=policy)
    settings = SchedulerSettings.of(described, mode, profile)
    model = cost_from_config_json(
        config.model.path, name=config.model.name, kv_dtype=config.model.dtype
    )
    flops_per_s = costs.prefill_tokens_per_s * model.flops_at(costs.context_tokens)
    return SimSpec(
        cluster=_cluster(config, costs),
        model=model,
        engine=EngineCost(
            flops_per_s,
            prefill_step_s=costs.prefill_step_s,
            decode_step_s=costs.decode_step_s,
            decode_step_per_request_s=costs.decode_step_per_request_s,
            decode_start_s=costs.decode_start_s,
            request_overhead_s=costs.request_overhead_s,
        ),
        features=_features(config, mode, model, settings.policy, profile is not None),
        name=config.name,
        block_tokens=config.engine.block_tokens,
        fetch_interval_s=min(_FETCH_S, float(described.fetch_interval)),
        quota_s=float(described.compute_quota),
        max_step_tokens=config.engine.max_batched_tokens,
        quota_step_tokens=config.engine.max_batched_tokens,
        alpha_tokens=settings.alpha_tokens,
        beta_tokens=settings.beta_tokens,
        z_factor=settings.z_factor,
    )


def _features(
    config: ClusterConfig, mode: Mode, model: ModelCost, policy: str, quota: bool
) -> Features:
    features = MODES[mode.value]
    resident = model.num_layers
    if config.engine.layer_aliasing:
        resident = config.engine.window(resident)
    return replace(
        features,
        policy=policy,
        quota=features.quota and quota,
        resident_layers=max(2, resident),
    )


def _cluster(config: ClusterConfig, costs: MeasuredCosts) -> ClusterSpec:
    prefill = [node for node in config.nodes if node.role is Role.PREFILL]
    decode = [node for node in config.nodes if node.role is Role.DECODE]
    nodes = [*prefill, *decode]
    for name in costs.snic_bytes_per_s:
        if all(node.name != name for node in nodes):
            raise ValueError(f"snic_bytes_per_s: no node is named {name!r}")
    engines = {node.engines for node in nodes}
    if len(engines) > 1:
        raise ValueError(
            f"nodes: {', '.join(f'{node.name} has {node.engines}' for node in nodes)} engines; "
            "the simulator needs the same number on every node"
        )
    count = engines.pop()
    rates = {node.name: _snic(node, costs) for node in nodes}
    slowest = min(rates.values())
    buffers = config.buffers
    return ClusterSpec(
        prefill_nodes=len(prefill),
        decode_nodes=len(decode),
        gpus_per_node=count,
        snic_bytes_per_s=slowest,
        snic_scale={name: rate / slowest for name, rate in rates.items() if rate != slowest},
        cnic_bytes_per_s=_cnic(nodes, costs),
        pe_buffer_bytes=float(buffers.prefill * count),
        de_buffer_bytes=float(buffers.decode * count),
        pe_hbm_bytes=float(config.engine.kv_cache),
        de_hbm_bytes=float(config.engine.kv_cache),
        names=tuple(node.name for node in nodes),
        one_fetch_group=True,
        copies_on_cnic=config.engine.copy == "cnic",
    )


def _snic(node: NodeConfig, costs: MeasuredCosts) -> float:
    return float(costs.snic_bytes_per_s.get(node.name, node.snic.read))


def _cnic(nodes: Iterable[NodeConfig], costs: MeasuredCosts) -> float:
    if costs.cnic_bytes_per_s is not None:
        return costs.cnic_bytes_per_s
    rates = {float(node.cnic.rate) for node in nodes}
    if len(rates) > 1:
        raise ValueError("nodes: cnic.rate differs; the simulator needs the same on every node")
    return rates.pop()
