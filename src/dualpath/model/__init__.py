"""Facts of a model: geometry, KV bytes, parameters. Pure."""

from dualpath.model.facts import DTYPE_BYTES, Attention, ModelFacts
from dualpath.model.families import FAMILIES, Family
from dualpath.model.reader import UnsupportedModel

__all__ = ["DTYPE_BYTES", "FAMILIES", "Attention", "Family", "ModelFacts", "UnsupportedModel"]
