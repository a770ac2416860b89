"""A simulation's input and output as files: a TOML description in, JSON and Parquet out."""

from __future__ import annotations

import importlib
import tomllib
from array import array
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dualpath.model import KvTerm, ModelCost, preset_cost
from dualpath.model.describe import cost_from_config_json
from dualpath.sim.presets import MAIN_CALIBRATION, preset
from dualpath.sim.result import SimResult
from dualpath.sim.spec import MODES, ClusterSpec, EngineCost, RolesSpec, SimSpec

T = TypeVar("T")
RESULT_FILE: Final = "result.json"
REQUESTS_FILE: Final = "requests.parquet"
SNIC_FILE: Final = "snic.parquet"
_PARTS: Final = ("cluster", "model", "engine", "features")
_PLAIN_MODEL: Final = ("num_layers", "flops_per_token", "kv_bytes_per_token")


class SpecError(ValueError):
    """A description cannot be used; one line ``file: field: what would be right``."""


def read_spec(path: str | Path) -> SimSpec:
    """A ``SimSpec`` from a TOML file.

    ``preset`` (with ``calibration``) is a starting point whose fields the rest of the file
    replaces; without it ``[cluster]``, ``[model]`` and ``[engine]`` are needed. ``mode`` is one of
    ``MODES``; ``[features]`` replaces fields of it. Every other key is a field of ``SimSpec``.
    ``[model]`` has ``preset`` (of ``dualpath.model``), or ``config`` (a ``config.json``) with
    ``kv_dtype``, or plain figures: ``num_layers``, ``flops_per_token``, ``kv_bytes_per_token``.

    Raises:
        SpecError: unreadable, or a field is unknown, missing or out of range.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not TOML: {error}") from None
    try:
        return _spec(values, path.parent)
    except ValueError as error:  # of the parts themselves, and of the model's description
        raise SpecError(f"{path}: {error}") from None


def write_result(result: SimResult, folder: str | Path) -> list[Path]:
    """``result.json`` and, per measured request and per window, two Parquet files.

    Returns:
        What was written.

    Raises:
        ModuleNotFoundError: pyarrow is missing (the ``sim`` extra has it); nothing was written.
        OSError: the folder cannot be written.
    """
    # Not needed by anything else, and large: loaded only here.
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    samples = result.samples
    columns: dict[str, array[float]] = {
        "submit_s": samples.submit_s,
        "ttft_s": samples.ttft_s,
        "ttst_s": samples.ttst_s,
        "tpot_s": samples.tpot_s,
        **{f"{name}_s": values for name, values in samples.split_s.items()},
    }
    requests = arrow.table({name: arrow.array(memoryview(v)) for name, v in columns.items()})
    parquet.write_table(requests, folder / REQUESTS_FILE)
    windows = result.windows
    count = max((len(series) for series in windows.read_bytes.values()), default=0)
    table: dict[str, list[float]] = {"start_s": [at * windows.window_s for at in range(count)]}
    for node, series in windows.read_bytes.items():
        table[node] = [*series, *[0.0] * (count - len(series))]
    parquet.write_table(arrow.table(table), folder / SNIC_FILE)
    line = msgspec.json.format(msgspec.json.encode(result.to_json()), indent=2)
    (folder / RESULT_FILE).write_bytes(line + b"\n")
    return [folder / name for name in (RESULT_FILE, REQUESTS_FILE, SNIC_FILE)]


def _spec(values: Mapping[str, Any], folder: Path) -> SimSpec:
    numbers = {item.name for item in fields(SimSpec)} - set(_PARTS)
    _known(values, {"preset", "calibration", "mode", *_PARTS, *numbers}, "")
    mode = values.get("mode", "dualpath")
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    base: dict[str, Any]
    if "preset" in values:
        calibration = values.get("calibration", MAIN_CALIBRATION)
        base = msgspec.to_builtins(preset(str(values["preset"]), mode, calibration))
    else:
        for name in ("cluster", "model", "engine"):
            if name not in values:
                raise ValueError(f"{name}: is missing, and so is preset")
        base = {"cluster": {}, "engine": {}, "features": msgspec.to_builtins(MODES[mode])}
    base.update({name: values[name] for name in numbers if name in values})
    _known(values.get("roles", {}), {item.name for item in fields(RolesSpec)}, "roles")
    for name, known in (("cluster", ClusterSpec), ("engine", EngineCost), ("features", None)):
        part = values.get(name, {})
        allowed = {item.name for item in fields(known)} if known else set(base["features"])
        _known(part, allowed, name)
        base[name] = {**base[name], **part}
    if "model" in values:
        base["model"] = msgspec.to_builtins(_model(values["model"], folder))
    return _convert(base, SimSpec, "")


def _model(values: Any, folder: Path) -> ModelCost:
    _known(values, {"preset", "config", "kv_dtype", "name", *_PLAIN_MODEL}, "model")
    if "preset" in values:
        return preset_cost(str(values["preset"]))
    if "config" in values:
        source = folder / str(values["config"])
        return cost_from_config_json(source, kv_dtype=values.get("kv_dtype"))
    for name in _PLAIN_MODEL:
        if name not in values:
            raise ValueError(f"model.{name}: is missing (or give model.preset or model.config)")
    layers, flops, size = (values[name] for name in _PLAIN_MODEL)
    cost = {
        "name": values.get("name", "model"),
        "num_layers": layers,
        "flops_base_per_token": flops,
        "attention": [],
        "kv": [msgspec.to_builtins(KvTerm(size))],
    }
    return _convert(cost, ModelCost, "model")


def _convert(values: Any, kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        text, mark, where = str(error).rpartition(" - at `$.")
        field = f"{name}." if name else ""
        raise ValueError(f"{field}{where.rstrip('`')}: {text}" if mark else str(error)) from None


def _known(values: Any, known: set[str], name: str) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}: must be a table")
    for key in values:
        if key not in known:
            where = f"{name}.{key}" if name else key
            raise ValueError(f"{where}: is not a field; there are: {', '.join(sorted(known))}")
