"""The simulator asked about the lab: what it says of every variant, given what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from dualpath.config import ClusterConfig
from dualpath.lab.costs import Costs, simulated
from dualpath.lab.counting import HEADER_BYTES
from dualpath.lab.experiments import Case
from dualpath.model.describe import cost_from_config_json
from dualpath.report.lab.bounds import Balance, balance
from dualpath.report.lab.results import RunResult
from dualpath.sim import predict

_SHORTEST_S: Final = 1.0
"""A storage NIC's rate is taken from runs in which it was busy for longer."""
_MTU_BYTES: Final = 1500


def predictions(
    case: Case,
    config: ClusterConfig,
    costs: Costs,
    runs: Sequence[RunResult],
    cnic_bytes_per_s: float,
) -> dict[str, float]:
    """JCT of every variant, seconds, mean over agents; empty where no storage NIC was busy for long
    enough to know its rate.

    Raises:
        ValueError, UnsupportedModel: the simulator cannot be asked about such a cluster.
    """
    rates = snic_rates(config, runs)
    if not rates:
        return {}
    payload = 1 - HEADER_BYTES / _MTU_BYTES
    measured = costs.measured(rates, payload * cnic_bytes_per_s)
    found = {}
    for variant in case.variants:
        result = predict(
            config,
            measured,
            simulated(case.shape),
            mode=variant.mode,
            policy=variant.policy,
            agents=case.shape.agents,
            aps=case.aps,
            seed=case.seed,
        )
        if result.jct is not None:
            found[variant.name] = result.jct.mean
    return found


def balance_of(case: Case, config: ClusterConfig, costs: Costs, snic_bytes_per_s: float) -> Balance:
    """How storage and computation stand to each other for a mean request of the case.

    Raises:
        UnsupportedModel: the model's costs are not known.
    """
    model = cost_from_config_json(
        config.model.path, name=config.model.name, kv_dtype=config.model.dtype
    )
    requests = case.shape.agents * case.shape.turns
    hits = case.shape.hit_tokens(config.engine.block_tokens) // requests
    misses = case.shape.prompt_tokens // requests - hits
    return balance(
        cnic_bytes_per_s=config.nodes[0].cnic.rate,
        snic_bytes_per_s=snic_bytes_per_s,
        hit_bytes=model.kv_bytes(hits),
        miss_flops=model.prefill_flops(hits, misses),
        node_flops_per_s=costs.prefill_tokens_per_s * model.flops_at(costs.context_tokens),
    )


def snic_rates(config: ClusterConfig, runs: Sequence[RunResult]) -> dict[str, float]:
    """Stored bytes a second that each node reads while it is busy; a node that never was is taken
    for as fast as the others."""
    seen: dict[str, list[float]] = {}
    for run in runs:
        if run.busy.seconds < _SHORTEST_S:
            continue
        for node, received in run.busy.read_bytes.items():
            counted = run.nics[node].snic_rx_bytes
            share = run.snic_metric_bytes.get(node, 0) / counted if counted else 0.0
            if received and share:
                seen.setdefault(node, []).append(share * received / run.busy.seconds)
    known = {node: statistics.median(values) for node, values in seen.items()}
    if not known:
        return {}
    usual = statistics.median(known.values())
    return {node.name: known.get(node.name, usual) for node in config.nodes}
