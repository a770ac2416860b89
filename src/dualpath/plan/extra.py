"""What the paper's bounds leave out, for a model and a workload: KV of computed and generated
tokens, write-back, and model communication. Reported beside the bounds, never mixed into them."""

from __future__ import annotations

from fractions import Fraction

from dualpath.model.cost import ModelCost
from dualpath.plan.traffic import Extra
from dualpath.workload.stats import TraceStats


def extra_traffic(stats: TraceStats, model: ModelCost | None) -> Extra:
    """Further bytes for each hit byte.

    Args:
        stats: the workload; its hit ratio is that of an unbounded cache.
        model: adds model communication; without it there is none.

    Raises:
        ValueError: nothing is ever hit, so that no storage is read.
    """
    hits = Fraction(stats.hit_ratio) * stats.tokens_in
    if hits <= 0:
        raise ValueError("the workload never hits the cache: every trajectory has one round")
    miss, gen = (stats.tokens_in - hits) / hits, stats.tokens_out / hits
    communication = Fraction(0)
    if model is not None and model.kv_bytes_per_token:
        communication = Fraction(model.collective_bytes_per_token, model.kv_bytes_per_token)
    return Extra(
        miss=miss,
        gen=gen,
        prefill_collectives=miss * communication,
        decode_collectives=gen * communication,
    )
