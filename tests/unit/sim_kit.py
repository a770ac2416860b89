"""Small simulated clusters whose every figure is a round number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dualpath.model import AttentionTerm, KvTerm, ModelCost
from dualpath.sim import MODES, ClusterSpec, EngineCost, SimSpec
from dualpath.workload.trace import Round, Trajectory

TOKEN_BYTES = 1000
LAYERS = 10
FLOPS_PER_TOKEN = 1_000_000_000


def small(
    mode: str = "dualpath", *, context_flops: int = 0, engine: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None, **cluster: Any,
) -> SimSpec:  # fmt: skip
    """One PE and one DE node of one GPU: 1,000 tokens/s of prefill, 100,000 tokens/s of SNIC,
    1,000,000 tokens/s of CNIC; decode steps of 10 ms."""
    attention = (AttentionTerm(context_flops),) if context_flops else ()
    model = ModelCost("small", LAYERS, FLOPS_PER_TOKEN, attention, (KvTerm(TOKEN_BYTES),))
    base = ClusterSpec(
        prefill_nodes=1, decode_nodes=1, gpus_per_node=1, snic_bytes_per_s=1e8,
        cnic_bytes_per_s=1e9, pe_buffer_bytes=1e9, de_buffer_bytes=1e9, pe_hbm_bytes=1e9,
        de_hbm_bytes=1e9,
    )  # fmt: skip
    costs = EngineCost(flops_per_s=1e12, prefill_step_s=0.0, decode_step_s=0.01)
    return SimSpec(
        replace(base, **cluster), model, replace(costs, **(engine or {})), MODES[mode],
        name="small", **(spec or {}),
    )  # fmt: skip


def agent(name: str, *rounds: Sequence[float | None]) -> Trajectory:
    """A trajectory of ``(append, gen[, latency])``."""
    return Trajectory(
        name,
        tuple(
            Round(int(one[0] or 0), int(one[1] or 0), one[2] if len(one) > 2 else 0.0)
            for one in rounds
        ),
    )
