"""What is simulated: cluster, costs, switches. Immutable; checked when made.

Everything is in SI units: bytes, bytes a second, FLOPs a second, seconds, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from dualpath.model import ModelCost
from dualpath.scheduler import SchedulerSettings

GIGA: Final = 1e9


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def _not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Machines and what joins them.

    Attributes:
        prefill_nodes, decode_nodes: nodes whose engines are all PEs, all DEs.
        gpus_per_node: engines of a node.
        snic_bytes_per_s: a node's storage NIC, each way; may be infinite.
        cnic_bytes_per_s: a GPU's compute NIC, each way; may be infinite.
        pe_buffer_bytes, de_buffer_bytes: host memory for KV on the way, per node.
        pe_hbm_bytes, de_hbm_bytes: memory for KV per GPU.
        prefill_lockstep, decode_lockstep: GPUs whose steps begin and end together (expert
            parallelism over data-parallel attention); 1 for engines that step alone. The nodes of
            a lockstep group, or else each node, fetch together.
        snic_scale: factor on a node's SNIC by node name (``pe0``, ``de3``): uneven NICs.
        compute_scale: factor on the speed of a node's GPUs by node name: stragglers.
        failures: ``(node, second)``: the node dies then and does not come back.
        names: of the nodes, prefill before decode; empty for ``pe0``, ..., ``de0``, ...
        one_fetch_group: all engines of a role fetch together, as the live front has them fetch,
            whatever steps together.
        copies_on_cnic: copies between a node's memory and its GPUs pass the CNIC (a loopback on
            the PE's side, P2 and P5); else they cost nothing.

    Raises:
        ValueError: a figure is out of range, or a name is no node; the message names the field.
    """

    prefill_nodes: int
    decode_nodes: int
    gpus_per_node: int = 8
    snic_bytes_per_s: float = 50 * GIGA
    cnic_bytes_per_s: float = 50 * GIGA
    pe_buffer_bytes: float = 80 * GIGA
    de_buffer_bytes: float = 80 * GIGA
    pe_hbm_bytes: float = 12 * GIGA
    de_hbm_bytes: float = 50 * GIGA
    prefill_lockstep: int = 1
    decode_lockstep: int = 1
    snic_scale: Mapping[str, float] = field(default_factory=dict)
    compute_scale: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[tuple[str, float], ...] = ()
    names: tuple[str, ...] = ()
    one_fetch_group: bool = False
    copies_on_cnic: bool = True

    def __post_init__(self) -> None:
        _positive(
            self, "prefill_nodes", "decode_nodes", "gpus_per_node", "snic_bytes_per_s",
            "cnic_bytes_per_s", "pe_buffer_bytes", "de_buffer_bytes", "pe_hbm_bytes",
            "de_hbm_bytes", "prefill_lockstep", "decode_lockstep",
        )  # fmt: skip
        nodes = self.prefill_nodes + self.decode_nodes
        if self.names and not len(self.names) == len(set(self.names)) == nodes:
            raise ValueError(f"names must be {nodes} different ones, got {', '.join(self.names)}")
        known = {*self.prefill_names, *self.decode_names}
        for name in ("snic_scale", "compute_scale"):
            for node, factor in getattr(self, name).items():
                if node not in known or not factor > 0:
                    raise ValueError(f"{name}: {node!r}: {factor} is no factor of a node")
        for node, at_s in self.failures:
            if node not in known or not at_s >= 0:
                raise ValueError(f"failures: {node!r} at {at_s} s is no moment of a node")

    @property
    def prefill_names(self) -> list[str]:
        """Names of the prefill nodes."""
        if self.names:
            return list(self.names[: self.prefill_nodes])
        return [f"pe{index}" for index in range(self.prefill_nodes)]

    @property
    def decode_names(self) -> list[str]:
        """Names of the decode nodes."""
        if self.names:
            return list(self.names[self.prefill_nodes :])
        return [f"de{index}" for index in range(self.decode_nodes)]

    @property
    def gpus(self) -> int:
        """Engines altogether."""
        return (self.prefill_nodes + self.decode_nodes) * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class EngineCost:
    """How fast a GPU serves one model. Measured or calibrated, never derived.

    Attributes:
        flops_per_s: effective rate of prefill.
        attention_share: part of the FLOPs that do not grow with the context which a GPU of a
            lockstep group does for its own requests (projections of attention); the rest (experts)
            is spread evenly over the group.
        prefill_step_s: fixed time of a prefill step.
        decode_step_s: fixed time of a decode step.
        decode_step_per_request_s: time each request of a GPU adds to it; of a lockstep group the
            fullest GPU counts by the part of a token's FLOPs that is its own, the mean one by the
            part that is spread.
        decode_knee_requests: requests of a GPU up to which that holds; each further one adds
            ``decode_step_per_further_request_s``. A step's time is seldom measured over the whole
            range of batches, and it bends: once every expert's weights are read in a step anyhow,
            one request more costs little.
        decode_start_s: from the prompt's KV being in HBM to the first decode step.
        request_overhead_s: declared constant of every request: from the client's sending it to its
            standing in the scheduler's queue (front, tokenizer, network). Part of every TTFT and
            JCT; in the split of the TTFT it is part of ``schedule``.

    Raises:
        ValueError: a figure is out of range.
    """

    flops_per_s: float
    attention_share: float = 1.0
    prefill_step_s: float = 0.06
    decode_step_s: float = 0.02
    decode_step_per_request_s: float = 0.0
    decode_start_s: float = 0.0
    request_overhead_s: float = 0.0
    decode_knee_requests: float = math.inf
    decode_step_per_further_request_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "flops_per_s")
        _not_negative(
            self, "prefill_step_s", "decode_step_s", "decode_step_per_request_s",
            "decode_start_s", "request_overhead_s", "decode_step_per_further_request_s",
        )  # fmt: skip
        if not self.decode_knee_requests >= 0:
            raise ValueError(
                f"decode_knee_requests must not be negative, got {self.decode_knee_requests}"
            )
        if not 0 <= self.attention_share <= 1:
            raise ValueError(f"attention_share must be in 0 .. 1, got {self.attention_share}")

    def decode_added_s(self, requests: float) -> float:
        """What ``requests`` of a GPU add to the fixed time of a decode step."""
        further = max(0.0, requests - self.decode_knee_requests)
        return (
            self.decode_step_per_request_s * (requests - further)
            + self.decode_step_per_further_request_s * further
        )


@dataclass(frozen=True, slots=True)
class Features:
    """What a system does: the switches between the modes.

    Attributes:
        name: of the mode.
        policy: of the scheduler: a name of ``POLICY_SETS`` or ``prefill/decode/path``.
        layerwise: KV is moved layer by layer beside the computation, and HBM holds
            ``resident_layers`` of a batch; else copies come before and after it and HBM holds all.
        quota: PE batches are cut by predicted attention time; else by tokens only.
        transfers: False skips all storage, host-device and PE-DE transfers (oracle).
        resident_layers: prefetch depth + 1.
        pool_bytes_per_node: DRAM of each prefill node that keeps KV between rounds, least recently
            used out first; requests go where their KV is. 0 for none. A model of
            SGLang + Mooncake, not a measurement of it.
    """

    name: str
    policy: str
    layerwise: bool = True
    quota: bool = True
    transfers: bool = True
    resident_layers: int = 2
    pool_bytes_per_node: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(self, "pool_bytes_per_node")
        if self.resident_layers < 2:
            raise ValueError(f"resident_layers must be at least 2, got {self.resident_layers}")


MODES: Final[Mapping[str, Features]] = MappingProxyType(
    {
        features.name: features
        for features in (
            Features("basic", "basic", layerwise=False, quota=False),
            Features("layerwise", "basic", quota=False),
            Features("alternating", "round_robin", quota=False),
            Features("dualpath", "paper"),
            Features("pe-only", "pe_only"),
            Features("split", "split"),
            Features("oracle", "paper", transfers=False),
            Features("comparator", "basic", quota=False, pool_bytes_per_node=1.5e12),
        )
    }
)
"""By name. The ablation is ``basic``, ``layerwise``, ``alternating`` (+ dual path), ``dualpath``
(+ scheduling), each adding one thing."""


@dataclass(frozen=True, slots=True)
class RolesSpec:
    """Nodes change between prefill and decode as the load shifts (``scheduler.roles``).

    Attributes:
        reload_s: from having drained to serving in the other role: loading its weights, warming up.
        check_s: between two looks at the load.

    Raises:
        ValueError: a figure is out of range.
    """

    reload_s: float = 60.0
    check_s: float = 5.0

    def __post_init__(self) -> None:
        _not_negative(self, "reload_s")
        _positive(self, "check_s")


@dataclass(frozen=True, slots=True)
class SimSpec:
    """A cluster that serves one model in one mode.

    Attributes:
        cluster, model, engine, features: see there.
        name: for people.
        block_tokens: tokens of a Full Block.
        fetch_interval_s: between two fetches of a group.
        quota_s: attention time of a PE batch.
        max_step_tokens: most tokens of a PE step without the quota, per GPU. The paper prints none;
            with 4,096 a GPU DeepEP, the communication library of such engines, publishes its
            prefill kernels.
        quota_step_tokens: the same with the quota; None: time alone cuts a step.
        alpha_tokens, beta_tokens: thresholds of the scheduler; None derives them as ``profile``
            does: alpha from the SNIC, beta from compute and the workload's own hit ratio.
        z_factor: see ``SchedulerSettings``.
        slo_ttft_s, slo_tpot_s: limits of an online run.
        roles: how nodes change roles; None: they do not.

    Raises:
        ValueError: a figure is out of range; the message names it.
    """

    cluster: ClusterSpec
    model: ModelCost
    engine: EngineCost
    features: Features
    name: str = ""
    block_tokens: int = 64
    fetch_interval_s: float = 0.1
    quota_s: float = 0.3
    max_step_tokens: int = 4_096
    quota_step_tokens: int | None = None
    alpha_tokens: int | None = None
    beta_tokens: int | None = None
    z_factor: float = 1.05
    slo_ttft_s: float = 4.0
    slo_tpot_s: float = 0.05
    roles: RolesSpec | None = None

    def __post_init__(self) -> None:
        _positive(
            self, "block_tokens", "fetch_interval_s", "quota_s", "max_step_tokens", "slo_ttft_s",
            "slo_tpot_s",
        )  # fmt: skip
        if self.quota_step_tokens is not None:
            _positive(self, "quota_step_tokens")
        SchedulerSettings(0, 0, self.z_factor, self.features.policy)
        if self.roles is not None and (self.cluster.failures or self.features.pool_bytes_per_node):
            raise ValueError("roles: cannot be simulated together with failures or a DRAM pool")
        if self.model.kv_bytes_per_token <= 0:
            raise ValueError(f"model: {self.model.name} keeps no KV of a whole context")

    def with_mode(self, mode: str) -> SimSpec:
        """The same cluster in another mode.

        Raises:
            ValueError: no such mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
        return replace(self, features=MODES[mode])
