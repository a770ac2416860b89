from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath import config
from dualpath.config import ConfigError, Mode, Role

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {
    "model": {"path": "some/model"},
    "nodes": [
        {"name": "n0", "role": "prefill", "engines": 2, "snic": {"read": "50Mbit/s"}},
        {"name": "n1", "role": "decode", "cnic": {"rate": "400Mbit/s", "ports": "20480-20511"}},
    ],
    "buffers": {"prefill": "64MiB"},
    "timeouts": {"request": "2min", "transfer": "1500ms"},
}


def changed(where: tuple[str | int, ...], value: object) -> dict[str, Any]:
    data = copy.deepcopy(BASE)
    place: Any = data
    for part in where[:-1]:
        place = place.setdefault(part, {}) if isinstance(part, str) else place[part]
    place[where[-1]] = value
    return data


def test_values_are_typed_and_in_base_units() -> None:
    cluster = config.parse(BASE)
    assert cluster.mode is Mode.DUALPATH
    assert cluster.nodes[0].role is Role.PREFILL
    assert cluster.nodes[0].snic.read == 50e6 / 8
    assert not cluster.nodes[0].snic.write.limited
    assert cluster.buffers.prefill == 64 * 2**20
    assert cluster.timeouts.request == 120.0
    assert cluster.timeouts.transfer == 1.5
    assert cluster.model.name == "model"
    assert [config.engine_name(Role.PREFILL, rank) for rank in range(2)] == ["pe0", "pe1"]
    assert [(node.name, local) for node, local in cluster.engines(Role.PREFILL)] == [
        ("n0", 0),
        ("n0", 1),
    ]


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("buffers", "prefill"), 64, ["buffers.prefill", "64", "unit"]),
        (("buffers", "prefill"), "64Mbit", ["buffers.prefill", "64Mbit", "MiB"]),
        (("buffers", "prefill"), "0.3B", ["buffers.prefill", "whole"]),
        (("nodes", 0, "snic", "read"), "50MiB", ["nodes[0].snic.read", "50MiB", "Mbit/s"]),
        (("nodes", 0, "snic", "read"), "0Mbit/s", ["nodes[0].snic.read", "above zero"]),
        (("timeouts", "request"), "2 fortnights", ["timeouts.request", "fortnights", "min"]),
        (("nodes", 0, "rolle"), "x", ["nodes[0]", "rolle"]),
        (("nodes", 0, "role"), "prefil", ["nodes[0].role", "prefil"]),
        (("nodes", 0, "engines"), 0, ["nodes[0].engines", "1"]),
        (("nodes", 1, "name"), "n0", ["n0", "unique"]),
        (("nodes", 1, "role"), "prefill", ["decode"]),
        (("mode",), "oracle", ["mode", "benchmark"]),
        (("mode",), "fast", ["mode", "fast"]),
        (("engine", "engine_block_tokens"), 48, ["engine", "multiple"]),
        (("front", "port"), 70000, ["front.port"]),
        (("front", "max_retries"), -1, ["front.max_retries"]),
        (("model",), {}, ["model", "path"]),
        (("cluster",), {}, ["cluster"]),
    ],
)
def test_a_wrong_value_gives_one_line_naming_it(
    where: tuple[str | int, ...], value: object, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(changed(where, value), "cluster.toml")
    message = str(caught.value)
    assert "\n" not in message
    for part in ["cluster.toml", *says]:
        assert part in message


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        config.load(tmp_path / "nowhere.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("a = [")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        config.load(bad)
    good = tmp_path / "good.toml"
    good.write_text(config.dump(config.parse(BASE)))
    assert config.load(good) == config.parse(BASE)


@given(
    st.integers(1, 2**50),
    st.floats(1e-3, 1e12, allow_nan=False),
    st.floats(1e-6, 1e6, allow_nan=False),
)
def test_dump_and_load_keep_every_digit(size: int, rate: float, seconds: float) -> None:
    cluster = config.parse(BASE)
    cluster = msgspec.structs.replace(
        cluster,
        buffers=msgspec.structs.replace(cluster.buffers, decode=config.Size(size)),
        timeouts=msgspec.structs.replace(cluster.timeouts, layer=config.Seconds(seconds)),
        nodes=(
            msgspec.structs.replace(
                cluster.nodes[0], snic=config.SnicConfig(read=config.Rate(rate))
            ),
            cluster.nodes[1],
        ),
    )
    again = config.parse(msgspec.toml.decode(config.dump(cluster).encode()))
    assert again == cluster
