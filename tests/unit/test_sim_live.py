"""A live cluster's file and measured costs make the simulation that they describe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sim_kit import agent

from dualpath.cli import main
from dualpath.config import ClusterConfig, Mode, dump, parse
from dualpath.scheduler.attention_time import AttentionTimeModel
from dualpath.scheduler.profile import Profile, encode_profile
from dualpath.sim import MeasuredCosts, live_spec, predict
from dualpath.workload.trace import write_trace

pytestmark = pytest.mark.unit

LAYERS = 4
TOKEN_BYTES = 2 * 2 * 32 * 4 * LAYERS  # K and V, 2 KV heads of 32, float32
COSTS = MeasuredCosts(prefill_tokens_per_s=1000.0, decode_step_s=0.01)
SNIC = 1_000 * TOKEN_BYTES  # bytes/s: 1,000 tokens a second
PROFILE = Profile("tiny", "a desk", TOKEN_BYTES, {"left": 2.0 * SNIC, "right": 1.0 * SNIC}, 500.0,
                  0.9, AttentionTimeModel(0.0, 1e-4, 0.0, 0.0, 0.0))  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 1000,
                "dtype": "float32",
            }
        )
    )
    return folder


def cluster(model: Path, **tables: Any) -> ClusterConfig:
    nic = {"snic": {"read": f"{SNIC}B/s"}, "cnic": {"rate": f"{10 * SNIC}B/s"}}
    nodes = [{"name": "left", "role": "prefill"} | nic, {"name": "right", "role": "decode"} | nic]
    return parse({"model": {"path": str(model)}, "nodes": nodes} | tables)


def test_one_agent_by_hand(model: Path) -> None:
    """The second round hits 640 of its 704 tokens and computes 64 behind them, which look at 672
    earlier ones on average."""
    trace = [agent("a", (640, 1), (63, 1))]
    costs = replace(COSTS, context_tokens=672)
    result = predict(cluster(model), costs, trace, mode=Mode.BASIC)
    assert result.failed == 0 and result.snic == {"left": 640.0 * TOKEN_BYTES, "right": 0.0}
    # Read at 1,000 tokens a second, computed as fast, all of it sent on at 10,000.
    read_s, compute_s, send_s = 0.64, 0.064, 0.0704
    assert result.ttft is not None
    assert result.ttft_split["read"].mean * 2 == pytest.approx(read_s)
    second = result.samples.ttft_s[1] - result.samples.split_s["schedule"][1]
    assert second == pytest.approx(read_s + compute_s + send_s, rel=1e-4)


def test_modes_and_policies_are_those_of_the_front(model: Path) -> None:
    config = cluster(model, scheduler={"policy": "work"})
    assert live_spec(config, COSTS).features.policy == "work"
    assert live_spec(config, COSTS, mode=Mode.PE_ONLY).features.policy == "pe_only"
    assert live_spec(config, COSTS, mode=Mode.PE_ONLY, policy="basic").features.policy == "basic"
    basic = live_spec(config, COSTS, mode=Mode.BASIC)
    assert not basic.features.layerwise and not basic.features.quota
    assert live_spec(config, COSTS, mode=Mode.SPLIT).features.resident_layers == 2
    whole = cluster(model, engine={"layer_aliasing": False})
    assert live_spec(whole, COSTS).features.resident_layers == LAYERS
    oracle = live_spec(config, COSTS, mode=Mode.ORACLE)
    assert not oracle.features.transfers


def test_measured_rates_go_before_limits(model: Path) -> None:
    costs = MeasuredCosts(1.0, 1.0, snic_bytes_per_s={"right": 3.0 * SNIC}, cnic_bytes_per_s=7.0)
    spec = live_spec(cluster(model), costs, profile=PROFILE)
    assert spec.cluster.cnic_bytes_per_s == 7.0
    assert spec.cluster.snic_bytes_per_s == SNIC and spec.cluster.snic_scale == {"right": 3.0}
    assert spec.alpha_tokens == PROFILE.alpha_tokens and spec.beta_tokens == PROFILE.beta_tokens
    assert spec.features.quota and not live_spec(cluster(model), costs).features.quota


def test_dualpath_reads_on_both_sides_and_is_faster(model: Path) -> None:
    trace = [agent(f"a{number}", *[(256, 8)] * 6) for number in range(8)]
    basic = predict(cluster(model), COSTS, trace, mode=Mode.BASIC)
    ours = predict(cluster(model), COSTS, trace, mode=Mode.DUALPATH)
    assert basic.snic["right"] == 0 < ours.snic["right"]
    assert sum(basic.snic.values()) == sum(ours.snic.values())
    assert ours.jct is not None and basic.jct is not None and ours.jct.mean < basic.jct.mean


def test_uneven_nodes_are_refused(model: Path) -> None:
    nodes = [{"name": "a", "role": "prefill", "engines": 2}, {"name": "b", "role": "decode"}]
    with pytest.raises(ValueError, match="a has 2, b has 1 engines"):
        live_spec(cluster(model, nodes=nodes), COSTS)
    with pytest.raises(ValueError, match="no node is named 'c'"):
        live_spec(cluster(model), MeasuredCosts(1.0, 1.0, snic_bytes_per_s={"c": 1.0}))


@pytest.mark.parametrize(
    "field", ["prefill_tokens_per_s", "decode_step_s", "context_tokens", "cnic_bytes_per_s"]
)
def test_impossible_costs_are_named(field: str) -> None:
    good = {"prefill_tokens_per_s": 1.0, "decode_step_s": 1.0}
    with pytest.raises(ValueError, match=field):
        MeasuredCosts(**{**good, field: -1})


def test_command_takes_a_cluster_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, file, trace = tmp_path / "p.json", tmp_path / "cluster.toml", tmp_path / "t.jsonl"
    profile.write_bytes(encode_profile(PROFILE))
    file.write_text(dump(cluster(model, scheduler={"profile": str(profile)})))
    write_trace(trace, [agent("a", (640, 4), (64, 4))])
    command = ["simulate", "--config", str(file), "--trace", str(trace), "--agents", "1", "--json"]
    assert main.run(command) == 2
    assert "--cost decode_step_s=" in capsys.readouterr().err
    costs = ["--cost", "decode_step_s=0.01", "--cost", f"snic_bytes_per_s.right={SNIC}"]
    assert main.run([*command, *costs]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["requests"] == 2 and set(line["snic"]) == {"left", "right"}
    assert line["path"]["pe"] + line["path"]["de"] == 640 * TOKEN_BYTES
    assert main.run([*command, "--cost", "speed=1"]) == 2
    assert "prefill_tokens_per_s" in capsys.readouterr().err
    for tokens in ("inf", "nan", "1.5", "-1"):
        assert main.run([*command, *costs, "--cost", f"context_tokens={tokens}"]) == 2
        assert capsys.readouterr().err.startswith("error: --cost: ")
    assert main.run([*command, *costs, "--mode", "alternating"]) == 2
    assert "live clusters" in capsys.readouterr().err
    profile.write_text("{}")
    assert main.run([*command, *costs]) == 2
    assert f"{file}: scheduler.profile: {profile}: " in capsys.readouterr().err


def test_costs_belong_to_a_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["simulate", "--cost", "decode_step_s=1"]) == 2
    assert "--cost" in capsys.readouterr().err
