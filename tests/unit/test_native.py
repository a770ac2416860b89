"""A libnuma for engines on systems without one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dualpath import config as cluster
from dualpath.engine import launch, native
from dualpath.engine.launch import Device

pytestmark = pytest.mark.unit


def missing(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "lib" / "dualpath-native"
    monkeypatch.setattr(native, "library_dir", lambda: folder)
    monkeypatch.setattr(launch, "library_dir", lambda: folder)
    return folder


def engine_env(inherited: dict[str, str]) -> dict[str, str]:
    config = cluster.parse(
        {
            "model": {"path": "m"},
            "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
        }
    )
    command = launch.plain_command(
        config, python="p", device=Device.CPU, host="h", http_port=1, inherited=inherited
    )
    return dict(command.env)


def test_a_system_with_libnuma_is_left_alone(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert native.provide() == "libnuma.so.1: the system's"
    assert not prefix.exists()
    assert "LD_LIBRARY_PATH" not in engine_env({})


def test_without_one_nixls_is_linked_and_engines_find_it(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = tmp_path / "libnuma-1.so"
    bundled.write_bytes(b"elf")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(native, "_bundled", lambda: bundled)
    for _ in range(2):  # setup may run again
        assert native.provide() == f"libnuma.so.1: {bundled}"
    assert (prefix / "libnuma.so.1").read_bytes() == b"elf"
    assert engine_env({})["LD_LIBRARY_PATH"] == str(prefix)
    assert engine_env({"LD_LIBRARY_PATH": "/a:/b"})["LD_LIBRARY_PATH"] == f"{prefix}:/a:/b"


def test_with_neither_the_error_says_what_to_install(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(native, "_NIXL", "no-such-distribution")
    with pytest.raises(FileNotFoundError, match="install your system's libnuma1 package"):
        native.provide()
    assert not (prefix / "libnuma.so.1").exists()
