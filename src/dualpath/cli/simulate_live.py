"""``simulate --config`` with the description of a live cluster."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from dualpath.config import ConfigError, Mode, load
from dualpath.serve.thresholds import read_profile
from dualpath.sim import MeasuredCosts, SimSpec, live_spec

_COSTS: Final = tuple(
    item.name for item in fields(MeasuredCosts) if item.name != "snic_bytes_per_s"
)
_SNIC: Final = "snic_bytes_per_s."
_CONTEXT: Final = "context_tokens"


def is_cluster(path: Path) -> bool:
    """Whether a file describes a live cluster, not a simulated one: only that has nodes.

    False for what is no TOML: the simulator's own reader says what is wrong with it.
    """
    try:
        return "nodes" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def cluster_spec(path: Path, mode: str | None, costs: Sequence[str]) -> SimSpec:
    """The cluster of that file as a simulation.

    Rates come from the profile that the file names (``scheduler.profile``), everything else, or
    another value, from ``costs``.

    Args:
        path: the cluster file.
        mode: None for the file's.
        costs: ``NAME=VALUE``, names of ``MeasuredCosts``, a node's SNIC as
            ``snic_bytes_per_s.NODE``.

    Raises:
        ValueError: one line that names the file or option and what to change.
    """
    config = load(path)
    given: dict[str, Any] = {}
    try:
        profile = read_profile(config.scheduler)
    except ConfigError as error:
        raise ValueError(f"{path}: {error}") from None
    if profile is not None:
        given["prefill_tokens_per_s"] = profile.miss_tokens_per_s
        given["snic_bytes_per_s"] = profile.snic_read_bytes_s
    snics = dict(given.get("snic_bytes_per_s", {}))
    for text in costs:
        name, value = _cost(text)
        if name.startswith(_SNIC):
            snics[name.removeprefix(_SNIC)] = value
        else:
            given[name] = _whole(text, value) if name == _CONTEXT else value
    given["snic_bytes_per_s"] = snics
    for name in ("prefill_tokens_per_s", "decode_step_s"):
        if name not in given:
            raise ValueError(
                f"{path}: describes a live cluster: give what was measured on it, --cost {name}="
            )
    try:
        measured = MeasuredCosts(**given)
    except ValueError as error:
        raise ValueError(f"--cost: {error}") from None
    known = {one.value: one for one in Mode}
    if mode is not None and mode not in known:
        raise ValueError(
            f"mode: {mode!r} is not one of {', '.join(known)}, which live clusters have"
        )
    try:
        return live_spec(config, measured, mode=known[mode] if mode else None, profile=profile)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _whole(text: str, value: float) -> int:
    if not value.is_integer():
        raise ValueError(f"--cost: {text!r} is no whole number of tokens")
    return int(value)


def _cost(text: str) -> tuple[str, float]:
    name, found, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        found = ""
    if not found or (name not in _COSTS and not name.startswith(_SNIC)):
        raise ValueError(
            f"--cost: {text!r} is not NAME=NUMBER with NAME one of {', '.join(_COSTS)}, {_SNIC}NODE"
        )
    return name, value
