"""What ``dualpath plan`` found, as plain objects (one JSON object)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from dualpath.model.cost import ModelCost
from dualpath.plan.extra import extra_traffic
from dualpath.plan.price import Prices, storage_bound
from dualpath.plan.ratio import RatioRange, busiest, by_traffic, closed_form
from dualpath.plan.search import Candidate, best_of
from dualpath.plan.traffic import Extra, Link, Load, Node
from dualpath.workload.stats import TraceStats


def range_answer(prefill: Node, decode: Node) -> dict[str, Any]:
    """``pd_min``, ``pd_max``, ``bounds`` and which links set them, of the closed forms; ``summed``
    is the same range by adding up traffic."""
    found, summed = closed_form(prefill, decode), by_traffic(prefill, decode)
    return {
        **_range(found),
        "pd_min_ratio": str(found.least),
        "pd_max_ratio": str(found.most),
        "conditions": {
            bound.link.value: bound.possible
            for bound in found.bounds
            if bound.least is None and bound.most is None
        },
        "summed": {"pd_min": float(summed.least), "pd_max": float(summed.most)},
    }


def _range(found: RatioRange) -> dict[str, Any]:
    limits = ((bound.link.value, bound.least, bound.most) for bound in found.bounds)
    bounds = {
        name: float(limit)
        for name, least, most in limits
        for limit in (least, most)
        if limit is not None
    }
    return {
        "pd_min": float(found.least),
        "pd_max": float(found.most),
        "empty": found.empty,
        "bounds": bounds,
        "binding": {
            "pd_min": [link.value for link in found.least_by],
            "pd_max": [link.value for link in found.most_by],
        },
        "impossible": [link.value for link in found.impossible],
    }


def extra_answer(
    prefill: Node, decode: Node, stats: TraceStats, model: ModelCost | None
) -> dict[str, Any]:
    """What the bounds leave out, per hit byte, and the range with it counted.

    Raises:
        ValueError: see ``extra_traffic``.
    """
    extra = extra_traffic(stats, model)
    return {
        "miss_per_hit_byte": float(extra.miss),
        "gen_per_hit_byte": float(extra.gen),
        "write_back_per_hit_byte": float(extra.miss + extra.gen),
        "prefill_collectives_per_hit_byte": float(extra.prefill_collectives),
        "decode_collectives_per_hit_byte": float(extra.decode_collectives),
        "range": _range(by_traffic(prefill, decode, extra)),
        "range_without_collectives": _range(
            by_traffic(prefill, decode, Extra(miss=extra.miss, gen=extra.gen))
        ),
    }


def cluster_answer(found: tuple[Load, ...]) -> dict[str, Any]:
    """Loads of given nodes: per link its busiest node, and the link that is nearest its limit."""
    worst = busiest(found)
    links: dict[str, dict[str, Any]] = {}
    for link in Link:
        of = [load for load in found if load.link is link]
        top = max(of, key=lambda load: load.utilisation)
        links[link.value] = {
            "node": top.node,
            "gbs": float(top.gbs),
            "capacity_gbs": float(top.capacity_gbs),
            "utilisation": float(top.utilisation),
        }
    return {
        "bottleneck_free": worst.utilisation <= 1,
        "binding": worst.link.value,
        "binding_node": worst.node,
        "links": links,
    }


def model_answer(model: ModelCost, stats: TraceStats | None) -> dict[str, Any]:
    """Costs of the model; with a workload the I/O a turn needs for its computation."""
    answer: dict[str, Any] = {
        "name": model.name,
        "active_parameters": model.active_parameters,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "collective_bytes_per_token": model.collective_bytes_per_token,
    }
    if stats is not None:
        answer["gb_per_pflop"] = model.table1_gb_per_pflop(
            round(stats.macro.context), max(1, round(stats.macro.append))
        )
    return answer


def storage_answer(
    stats: TraceStats,
    model: ModelCost,
    read_gbs: Fraction,
    nodes: tuple[int, int],
    prices: Prices | None,
) -> dict[str, Any]:
    """The ceiling that saturated storage NICs set, and what tokens cost at it.

    Args:
        read_gbs: of all nodes together.
        nodes: prefill and decode nodes that read so.

    Raises:
        ValueError: nothing is read.
    """
    rates = storage_bound(stats, model.kv_bytes_per_token, float(read_gbs))
    answer: dict[str, Any] = {
        "prefill_nodes": nodes[0],
        "decode_nodes": nodes[1],
        "agents_per_s": rates.agents_per_s,
        "tokens_in_per_s": rates.tokens_in_per_s,
        "tokens_out_per_s": rates.tokens_out_per_s,
    }
    if prices is not None:
        rate = rates.tokens_in_per_s + rates.tokens_out_per_s
        answer["cost_per_million_tokens"] = prices.per_million_tokens(*nodes, rate)
    return answer


def search_answer(
    candidates: list[Candidate], found: RatioRange, warmup_s: float
) -> dict[str, Any]:
    """The best division, and all that were tried; whether agents lived longer than the warm-up."""
    best = best_of(candidates)
    lives = [one.outcome.jct_s for one in candidates if one.outcome is not None]
    return {
        "warmup_too_short": any(life is None or life > warmup_s for life in lives),
        "best": None if best is None else _candidate(best, found),
        "candidates": [_candidate(one, found) for one in candidates],
    }


def _candidate(one: Candidate, found: RatioRange) -> dict[str, Any]:
    outcome = one.outcome
    return {
        "prefill_nodes": one.prefill_nodes,
        "decode_nodes": one.decode_nodes,
        "aps": one.aps,
        "bottleneck_free": Fraction(one.prefill_nodes, one.decode_nodes) in found,
        "ttft_s": None if outcome is None else outcome.ttft_s,
        "tpot_s": None if outcome is None else outcome.tpot_s,
        "jct_s": None if outcome is None else outcome.jct_s,
        "tokens_in_per_s": None if outcome is None else outcome.tokens_in_per_s,
        "tokens_out_per_s": None if outcome is None else outcome.tokens_out_per_s,
        "cost_per_million_tokens": one.cost_per_million_tokens,
    }
