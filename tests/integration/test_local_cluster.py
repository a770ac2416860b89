"""Ports, paths and the life of a cluster on one machine, with stand-in engines."""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from dualpath import config as cluster
from dualpath.config import ClusterConfig, ConfigError, Role
from dualpath.serve.local import CONFIG_FILE, StartFailed, local_cluster, resolve
from dualpath.serve.ports import NoFreePort, free_ports, is_free

pytestmark = pytest.mark.integration


def description(store: Path, **changes: object) -> ClusterConfig:
    data = {
        "model": {"path": str(store.parent)},
        "nodes": [
            {"name": "p", "role": "prefill", "engines": 3},
            {"name": "d", "role": "decode"},
        ],
        "front": {"port": 0, "control_port": 0},
        "storage": {"path": str(store)},
    }
    return cluster.parse({**data, **changes})


def test_open_ports_are_chosen_free_and_apart(tmp_path: Path) -> None:
    config = resolve(description(tmp_path / "store"))
    ports = [config.front.port, config.front.control_port]
    for node in config.nodes:
        ports += range(node.base_port, node.base_port + node.engines)
    assert len(set(ports)) == 2 + 3 + 1
    assert all(is_free("127.0.0.1", port) for port in ports)
    assert resolve(config) == config


def test_chosen_ports_are_not_the_kernels_own() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < low for _ in range(20) for port in free_ports("127.0.0.1", 2))


def test_ports_that_are_taken_are_avoided_or_refused(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"front\.port: port {port} .* is in use"):
            resolve(description(tmp_path / "s", front={"port": port, "control_port": 0}))
    (first,) = free_ports("127.0.0.1", 1)
    with pytest.raises(ConfigError, match=r"front\.control_port: port .* is in use"):
        resolve(description(tmp_path / "s", front={"port": first, "control_port": first}))
    with pytest.raises(NoFreePort):
        free_ports("127.0.0.1", 1, frozenset(range(65536)))


def test_another_machines_address_is_refused(tmp_path: Path) -> None:
    nodes = [
        {"name": "p", "role": "prefill", "host": "203.0.113.1"},
        {"name": "d", "role": "decode"},
    ]
    with pytest.raises(ConfigError, match=r"nodes\.p: 203\.0\.113\.1 cannot be used here"):
        resolve(description(tmp_path / "s", nodes=nodes))


def no_engine(config_file: Path, run_dir: Path, role: Role, rank: int) -> list[str]:
    """Shows what an engine is given, and ends."""
    code = "import sys; print(*sys.argv[1:]); sys.exit(9)"
    return [sys.executable, "-c", code, str(config_file), str(run_dir), role.value, str(rank)]


def check_secret(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64


async def test_an_engine_that_ends_at_start_ends_the_cluster_with_its_last_words(
    tmp_path: Path,
) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "store"
    with pytest.raises(StartFailed, match=r"(?s)ended with status 9; the end of .*cluster.toml"):
        async with local_cluster(description(store), run_dir, no_engine):
            pytest.fail("it cannot be up")
    assert store.is_dir()
    # What engines are given is complete: no open port, and a secret only this user can read.
    given = cluster.load(run_dir / CONFIG_FILE)
    assert resolve(given) == given, "the front's ports must be free again, and none be open"
    check_secret(Path(given.security.control_secret_file))
    assert stat.S_IMODE((tmp_path / "run" / CONFIG_FILE).stat().st_mode) == 0o600, "it holds keys"
    assert len([task for task in asyncio.all_tasks() if not task.done()]) == 1


async def test_what_the_front_refuses_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = description(tmp_path / "store")
    absent = msgspec.structs.replace(config.security, control_secret_file=str(tmp_path / "absent"))
    config = msgspec.structs.replace(config, security=absent)
    with pytest.raises(ConfigError, match=r"control_secret_file: .*absent"):
        async with local_cluster(config, tmp_path / "run", no_engine):
            pytest.fail("it cannot be up")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_one_cluster_a_run_folder(tmp_path: Path) -> None:
    config = description(tmp_path / "store")
    started = asyncio.Event()

    def slow(config_file: Path, run_dir: Path, role: Role, rank: int) -> list[str]:
        started.set()
        return [sys.executable, "-c", "import time; time.sleep(600)"]

    async def first() -> None:
        async with local_cluster(config, tmp_path / "run", slow):
            pytest.fail("nobody answers: it cannot be up")

    task = asyncio.create_task(first())
    await asyncio.wait_for(started.wait(), 10)
    with pytest.raises(ConfigError, match="another cluster runs from"):
        async with local_cluster(config, tmp_path / "run", no_engine):
            pytest.fail("it cannot be up")
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
    with pytest.raises(StartFailed):
        async with local_cluster(config, tmp_path / "run", no_engine):
            pytest.fail("it cannot be up")


async def test_an_own_secret_and_paths_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "mine"
    secret.write_text("s3cret")
    config = description(Path("store"), security={"control_secret_file": str(secret)})
    with pytest.raises(StartFailed):
        async with local_cluster(config, Path("run"), no_engine):
            pytest.fail("it cannot be up")
    given = cluster.load(tmp_path / "run" / CONFIG_FILE)
    assert given.security.control_secret_file == str(secret)
    assert given.storage.path == str(tmp_path / "store")
    assert given.model.path == str(tmp_path)
    same = msgspec.structs.replace(given.storage, path=config.storage.path)
    assert same == config.storage
