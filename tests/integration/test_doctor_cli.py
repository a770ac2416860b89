"""``dualpath doctor`` on this machine, with real storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli import main
from dualpath.doctor.finding import ok

pytestmark = pytest.mark.integration

CLUSTER = """
[model]
path = "{model}"
[front]
port = 0
control_port = 0
[storage]
path = "{store}"
capacity = "1GB"
[buffers]
prefill = "64MiB"
decode = "64MiB"
[engine]
kv_cache = "16MiB"
[[nodes]]
name = "p"
role = "prefill"
snic = {{ read = "{rate}" }}
[[nodes]]
name = "d"
role = "decode"
"""


@pytest.fixture(autouse=True)
def no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's import takes half a minute on a busy machine; unit tests look at imports."""
    monkeypatch.setattr("dualpath.doctor.checks.check_software", lambda: [ok("vllm", "x")])


def write(tmp_path: Path, rate: str = "8Mbit/s") -> Path:
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER.format(model=tmp_path / "m", store=tmp_path / "kv" / "s", rate=rate))
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main.run(["doctor", "--json", *arguments])
    out, err = capsys.readouterr()
    # The readable lines are on stderr; NIXL announces itself on stdout.
    assert err.count("ok  ") + err.count("warn") + err.count("fail") >= 5
    line: dict[str, Any] = json.loads(out.splitlines()[-1])
    return status, line


def check(line: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [entry for entry in line["checks"] if entry["check"] == name]
    assert isinstance(found, dict)
    return found


def test_a_node_is_checked_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = call(capsys, "--config", str(write(tmp_path)))
    assert (status, line["ok"], line["fail"]) == (0, True, 0)
    rate = check(line, "storage rate")
    assert "MB/s" in rate["text"]
    assert check(line, "storage space")["text"].startswith("0 bytes stored")
    assert check(line, "cluster")["text"] == "this machine is p, d"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml"]


def test_a_limit_above_the_measured_rate_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _status, line = call(capsys, "--config", str(write(tmp_path, "900Gbit/s")))
    rate = check(line, "storage rate")
    assert rate["level"] == "warn"
    assert "nodes.p.snic.read" in rate["text"]


def test_what_fails_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv").write_text("a file where the store should be")
    status, line = call(capsys, "--config", str(write(tmp_path)))
    assert (status, line["ok"]) == (1, False)
    assert check(line, "storage")["level"] == "fail"


def test_without_a_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    status, line = call(capsys)
    assert status == 0
    assert "no cluster file" in check(line, "cluster")["text"]


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.run(["doctor", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main.run(["doctor", "--help"]) == 0
    assert "Usage: dualpath doctor" in capsys.readouterr().out
