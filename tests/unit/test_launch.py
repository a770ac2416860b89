"""The engine's command line, part by part."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dualpath import config as cluster
from dualpath.config import ClusterConfig, ConfigError, Role
from dualpath.engine.launch import (
    Command,
    Device,
    EnginePlace,
    control_address,
    engine_command,
    http_port,
    plain_command,
)

pytestmark = pytest.mark.unit


def description(**changes: Any) -> ClusterConfig:
    data: dict[str, Any] = {
        "model": {"path": "org/model", "served_name": "m", "revision": "r1", "max_model_len": 512},
        "nodes": [
            {"name": "p", "role": "prefill", "engines": 2, "base_port": 7000},
            {"name": "d", "role": "decode", "host": "10.0.0.2", "base_port": 7100},
        ],
        "engine": {
            "kv_cache": "64MiB",
            "max_num_seqs": 5,
            "max_batched_tokens": 256,
            "threads": 3,
            "extra_args": ["--seed", "7"],
            "env": {"A": "b c"},
        },
    }
    return cluster.parse(data | changes)


def command(
    config: ClusterConfig,
    role: Role = Role.PREFILL,
    rank: int = 0,
    device: Device = Device.CPU,
    inherited: dict[str, str] | None = None,
) -> Command:
    place = EnginePlace(
        config_file=Path("/c.toml"),
        role=role,
        rank=rank,
        http_port=7001,
        control="10.0.0.1:9",
        run_dir=Path("/run/x"),
    )
    return engine_command(
        config, place, python="/venv/python", device=device, inherited=inherited or {}
    )


def option(argv: tuple[str, ...], name: str) -> str:
    assert argv.count(name) == 1, name
    return argv[argv.index(name) + 1]


def test_starts_vllms_own_server_with_the_configured_values() -> None:
    argv = command(description()).argv
    assert argv[:3] == ("/venv/python", "-m", "vllm.entrypoints.openai.api_server")
    expected = {
        "--model": "org/model",
        "--served-model-name": "m",
        "--revision": "r1",
        "--dtype": "float32",
        "--max-model-len": "512",
        "--block-size": "64",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--max-num-seqs": "5",
        "--max-num-batched-tokens": "256",
        "--host": "127.0.0.1",
        "--port": "7001",
        "--worker-cls": "dualpath.engine.worker.DualPathWorker",
    }
    assert {name: option(argv, name) for name in expected} == expected
    assert "--no-enable-prefix-caching" in argv
    assert argv[-2:] == ("--seed", "7")


def test_the_connector_is_told_its_place() -> None:
    argv = command(description(), Role.DECODE).argv
    assert json.loads(option(argv, "--kv-transfer-config")) == {
        "kv_connector": "DualPathConnector",
        "kv_connector_module_path": "dualpath.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "config_file": "/c.toml",
            "role": "decode",
            "rank": 0,
            "http_url": "http://10.0.0.2:7001",
            "control": "10.0.0.1:9",
            "run_dir": "/run/x",
        },
    }


def test_cpu_and_cuda_differ_where_they_must() -> None:
    cpu, cuda = command(description()), command(description(), device=Device.CUDA)
    assert "--enforce-eager" in cpu.argv
    assert "--enforce-eager" not in cuda.argv
    assert option(cpu.argv, "--distributed-executor-backend").endswith(".UniProcExecutor")
    assert "--distributed-executor-backend" not in cuda.argv
    assert cpu.env["OMP_NUM_THREADS"] == "3"
    assert cpu.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in cuda.env
    assert cpu.env["A"] == cuda.env["A"] == "b c"


@pytest.mark.parametrize(
    ("inherited", "rank", "expected"),
    [
        ({}, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4, 6"}, 0, "4"),
        ({"CUDA_VISIBLE_DEVICES": "4, 6"}, 1, "6"),
        ({"CUDA_VISIBLE_DEVICES": "5"}, 1, None),
    ],
)
def test_each_engine_takes_one_gpu(
    inherited: dict[str, str], rank: int, expected: str | None
) -> None:
    made = command(description(), Role.PREFILL, rank, Device.CUDA, inherited)
    assert made.env.get("CUDA_VISIBLE_DEVICES") == expected


def test_too_few_gpus_are_refused() -> None:
    nodes = [
        {"name": "p", "role": "prefill", "engines": 3},
        {"name": "d", "role": "decode"},
    ]
    with pytest.raises(ConfigError, match="names 2 GPUs for a node of 3 engines"):
        command(
            description(nodes=nodes),
            device=Device.CUDA,
            inherited={"CUDA_VISIBLE_DEVICES": "0,1"},
        )


def test_a_local_model_is_used_offline_and_without_revision(tmp_path: Path) -> None:
    config = description(model={"path": str(tmp_path), "revision": "r1"})
    made = command(config)
    assert made.env["HF_HUB_OFFLINE"] == "1"
    assert "--revision" not in made.argv
    assert option(made.argv, "--served-model-name") == tmp_path.name
    assert "HF_HUB_OFFLINE" not in command(description()).env


def test_an_engine_that_is_not_in_the_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode rank 1 does not exist"):
        command(description(), Role.DECODE, 1)
    with pytest.raises(ConfigError, match="rank"):
        http_port(description(), Role.PREFILL, -1)


def test_ports_follow_the_nodes_base_port() -> None:
    config = description()
    assert [http_port(config, Role.PREFILL, rank) for rank in (0, 1)] == [7000, 7001]
    assert http_port(config, Role.DECODE, 0) == 7100
    assert control_address(config) == "127.0.0.1:8001"


def test_open_ports_are_named() -> None:
    nodes = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    with pytest.raises(ConfigError, match="nodes: p: base_port must be set"):
        http_port(description(nodes=nodes), Role.PREFILL, 0)
    with pytest.raises(ConfigError, match="front: control_port must be set"):
        control_address(description(front={"control_port": 0}))


def test_the_reference_has_the_same_settings_and_no_connector() -> None:
    config = description()
    plain = plain_command(
        config, python="/venv/python", device=Device.CPU, host="127.0.0.1", http_port=7001
    )
    engine = command(config)
    start = engine.argv.index("--worker-cls")
    end = engine.argv.index("--kv-transfer-config") + 2
    assert plain.argv == engine.argv[:start] + engine.argv[end:]
    assert plain.env == engine.env


def test_the_shell_line_reads_back_to_the_same_words() -> None:
    made = command(description())
    words = shlex.split(made.shell())
    settings = dict(word.split("=", 1) for word in words[: len(made.env)])
    assert settings == made.env
    assert tuple(words[len(made.env) :]) == made.argv
