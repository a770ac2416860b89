"""The paper's clusters by name, under named calibrations.

A name is ``model-PpDd``: ``ds-660b-2p4d`` is DeepSeek-V3.2 on 2 prefill and 4 decode nodes. The
constants of a calibration are fitted to the published totals as a whole, never to a single figure;
C1 and C2 are kept because the paper contradicts itself and each fits a different part of it better;
C3 shows how much of what C2 misses lies in decode steps of large batches (docs/simulator.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from dualpath.model import KvRecord, preset_cost
from dualpath.sim.spec import GIGA, MODES, ClusterSpec, EngineCost, SimSpec

TERA: Final = 1e12
REQUEST_OVERHEAD_S: Final = 0.83
"""Of a request to the 660B system: chosen so that Table 3's smaller TTFT is met under the main
calibration. The published 1.739 s are twice what storage, network and computation account for; the
larger TTFT is a test."""

PUBLISHED_DECODE_REQUESTS: Final = 9.0
"""Requests of a GPU behind the published TPOT: 0.4 agents a second * 106 turns * 172 tokens *
0.039 s on 32 GPUs. A calibration's step is fitted up to here."""
PRODUCTION_DECODE_TOKENS_PER_S: Final = 14_800 / 8
"""What a GPU generates in DeepSeek's own service of the same architecture, H800, one day's mean
(DeepSeek, open-infra-index, "DeepSeek-V3/R1 Inference System Overview", 2025)."""
PRODUCTION_DECODE_STEP_S: Final = 1 / 21
"""There, for 20 to 22 tokens a second to a user; 88 requests of a GPU."""


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model as it stands in the paper's clusters.

    Attributes:
        cost: name of its costs in ``dualpath.model``.
        pe_hbm_bytes, de_hbm_bytes: KV room of a GPU. Not published. A DE's is 124 GB less its
            weights (experts spread over the lockstep group, the rest on each GPU): Qwen-32B with
            64 GB of weights on every GPU needs one of 141 GB, and there is one kind of GPU.
        buffer_bytes: host buffer of a node (A.4 of arXiv 2602.21548).
        prefill_lockstep_nodes, decode_lockstep_nodes: nodes over which experts are spread; 0 where
            engines step alone.
        engine: speed, the same in both calibrations unless ``Calibration`` overrides it.
    """

    cost: str
    pe_hbm_bytes: float
    de_hbm_bytes: float
    buffer_bytes: float
    prefill_lockstep_nodes: int
    decode_lockstep_nodes: int
    engine: EngineCost


MODELS: Final[Mapping[str, ModelPreset]] = MappingProxyType(
    {
        "ds-660b": ModelPreset(
            "ds-v3.2", 12 * GIGA, 87 * GIGA, 80 * GIGA, 2, 4,
            EngineCost(340 * TERA, 0.31, 0.06, 0.0234, 0.0015, 0.15, REQUEST_OVERHEAD_S),
        ),
        "ds-27b": ModelPreset(
            "ds-27b", 12 * GIGA, 118 * GIGA, 80 * GIGA, 1, 1,
            EngineCost(260 * TERA, 0.22, 0.06, 0.010, 0.0002, 0.15),
        ),
        "qwen-32b": ModelPreset(
            "qwen2.5-32b", 50 * GIGA, 60 * GIGA, 320 * GIGA, 0, 0,
            EngineCost(340 * TERA, 1.0, 0.06, 0.020, 0.0004, 0.15),
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """A set of constants that comes close to the published figures.

    Attributes:
        name: C1, C2 or C3.
        flops_per_s, decode_step_per_request_s: of the 660B model.
        record: layout of a DeepSeek KV entry.
        production_batches: decode steps of more requests than the published TPOT is for are those
            of DeepSeek's own service; else they lie on the line through that TPOT.
    """

    name: str
    flops_per_s: float
    decode_step_per_request_s: float
    record: KvRecord
    production_batches: bool = False


CALIBRATIONS: Final[Mapping[str, Calibration]] = MappingProxyType(
    {
        "C1": Calibration("C1", 340 * TERA, 0.0015, KvRecord.PLAIN),
        "C2": Calibration("C2", 240 * TERA, 0.0017, KvRecord.FLASHMLA),
        "C3": Calibration("C3", 240 * TERA, 0.0017, KvRecord.FLASHMLA, production_batches=True),
    }
)
MAIN_CALIBRATION: Final = "C2"
OTHER_CALIBRATION: Final[Mapping[str, str]] = MappingProxyType({"C1": "C2", "C2": "C1", "C3": "C2"})
"""What is printed beside each when one other is asked for."""


def preset(name: str, mode: str = "dualpath", calibration: str = MAIN_CALIBRATION) -> SimSpec:
    """A paper cluster.

    Args:
        name: ``model-PpDd``, e.g. ``ds-27b-1p2d``.
        mode: a key of ``MODES``.
        calibration: a key of ``CALIBRATIONS``.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    match = re.fullmatch(r"(.+)-([1-9]\d{0,3})p([1-9]\d{0,3})d", name)
    if match is None or match[1] not in MODELS:
        raise ValueError(
            f"preset: {name!r} is not MODEL-PpDd with MODEL one of {', '.join(MODELS)}, "
            "such as ds-660b-2p4d"
        )
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    if calibration not in CALIBRATIONS:
        raise ValueError(f"calibration: {calibration!r} is not one of {', '.join(CALIBRATIONS)}")
    model, constants = MODELS[match[1]], CALIBRATIONS[calibration]
    prefill_nodes, decode_nodes = int(match[2]), int(match[3])
    engine = model.engine
    if match[1] == "ds-660b":
        engine = replace(
            engine,
            flops_per_s=constants.flops_per_s,
            decode_step_per_request_s=constants.decode_step_per_request_s,
        )
        if constants.production_batches:
            engine = _large_batches(engine)
    deepseek = match[1].startswith("ds-")
    cluster = ClusterSpec(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        pe_buffer_bytes=model.buffer_bytes,
        de_buffer_bytes=model.buffer_bytes,
        pe_hbm_bytes=model.pe_hbm_bytes,
        de_hbm_bytes=model.de_hbm_bytes,
        prefill_lockstep=_gpus(model.prefill_lockstep_nodes, prefill_nodes),
        decode_lockstep=_gpus(model.decode_lockstep_nodes, decode_nodes),
    )
    cost = preset_cost(model.cost, record=constants.record if deepseek else None)
    return SimSpec(cluster, cost, engine, MODES[mode], name=name)


def _large_batches(engine: EngineCost) -> EngineCost:
    """Decode steps of more requests than the published TPOT is for: a line from there to what
    production does with 88. The calibrations' own slope would give a step of 170 ms there."""
    knee = PUBLISHED_DECODE_REQUESTS
    far = PRODUCTION_DECODE_TOKENS_PER_S * PRODUCTION_DECODE_STEP_S
    knee_s = engine.decode_step_s + engine.decode_step_per_request_s * knee
    slope_s = (PRODUCTION_DECODE_STEP_S - knee_s) / (far - knee)
    return replace(engine, decode_knee_requests=knee, decode_step_per_further_request_s=slope_s)


def _gpus(lockstep_nodes: int, nodes: int) -> int:
    return 8 * min(lockstep_nodes, nodes) if lockstep_nodes else 1
