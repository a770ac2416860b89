"""Facts and costs of a model: geometry, KV bytes, parameters, FLOPs. Pure."""

from dualpath.model.cost import AttentionTerm, KvTerm, ModelCost
from dualpath.model.describe import COST_FAMILIES, KvRecord, cost_from_config_json
from dualpath.model.facts import DTYPE_BYTES, Attention, ModelFacts
from dualpath.model.families import FAMILIES, Family
from dualpath.model.presets import PRESETS, Preset, preset_cost
from dualpath.model.reader import UnsupportedModel

__all__ = [
    "COST_FAMILIES",
    "DTYPE_BYTES",
    "FAMILIES",
    "PRESETS",
    "Attention",
    "AttentionTerm",
    "Family",
    "KvRecord",
    "KvTerm",
    "ModelCost",
    "ModelFacts",
    "Preset",
    "UnsupportedModel",
    "cost_from_config_json",
    "preset_cost",
]
