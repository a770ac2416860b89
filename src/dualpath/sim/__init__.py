"""Discrete-event simulator around the real scheduler."""

from dualpath.sim.live import MeasuredCosts, live_spec, predict
from dualpath.sim.presets import (
    CALIBRATIONS,
    MAIN_CALIBRATION,
    MODELS,
    OTHER_CALIBRATION,
    Calibration,
    preset,
)
from dualpath.sim.result import SPLIT, Samples, SimResult, Steps, Windows
from dualpath.sim.run import simulate
from dualpath.sim.spec import MODES, ClusterSpec, EngineCost, Features, RolesSpec, SimSpec

__all__ = [
    "CALIBRATIONS", "MAIN_CALIBRATION", "MODELS", "MODES", "OTHER_CALIBRATION", "SPLIT",
    "Calibration", "ClusterSpec", "EngineCost", "Features", "MeasuredCosts", "RolesSpec", "Samples",
    "SimResult", "SimSpec", "Steps", "Windows", "live_spec", "predict", "preset", "simulate",
]  # fmt: skip
