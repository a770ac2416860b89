"""What tokens cost when the storage NICs are the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualpath.workload.stats import TraceStats

_HOUR_S: Final = 3600.0
_MILLION: Final = 1e6
_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """Money an hour for one node of each kind, in any currency."""

    prefill_node: float
    decode_node: float

    def cluster_per_hour(self, prefill_nodes: int, decode_nodes: int) -> float:
        """All nodes for an hour."""
        return prefill_nodes * self.prefill_node + decode_nodes * self.decode_node

    def per_million_tokens(
        self, prefill_nodes: int, decode_nodes: int, tokens_per_s: float
    ) -> float:
        """Cost of a million tokens at that rate.

        Raises:
            ValueError: the rate is not above 0.
        """
        if tokens_per_s <= 0:
            raise ValueError(f"tokens_per_s: must be above 0, got {tokens_per_s}")
        hourly = self.cluster_per_hour(prefill_nodes, decode_nodes)
        return hourly / (tokens_per_s * _HOUR_S) * _MILLION


@dataclass(frozen=True, slots=True)
class StorageBound:
    """Rates at which saturated storage NICs let a workload run: a ceiling, whatever the GPUs do.

    Attributes:
        tokens_in_per_s: prompt tokens, hit and miss.
        tokens_out_per_s: generated tokens.
        agents_per_s: whole trajectories.
    """

    tokens_in_per_s: float
    tokens_out_per_s: float
    agents_per_s: float


def storage_bound(stats: TraceStats, kv_bytes_per_token: int, read_gbs: float) -> StorageBound:
    """Rates of a workload whose hits are read at ``read_gbs`` GB/s in all.

    Raises:
        ValueError: nothing is read.
    """
    bytes_in_all = stats.hit_ratio * stats.tokens_in * kv_bytes_per_token
    if bytes_in_all <= 0:
        raise ValueError("the workload reads nothing from storage")
    runs_per_s = read_gbs * _GIGA / bytes_in_all
    return StorageBound(
        tokens_in_per_s=runs_per_s * stats.tokens_in,
        tokens_out_per_s=runs_per_s * stats.tokens_out,
        agents_per_s=runs_per_s * stats.trajectories,
    )
