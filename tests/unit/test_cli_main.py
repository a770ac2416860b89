"""The program's own part of the command line: commands, version, errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dualpath import __version__
from dualpath.cli import main
from dualpath.cli.defaults import default_cluster
from dualpath.cli.demo_runs import ratio, snic_agree
from dualpath.cli.demo_talks import agents_of, conversations
from dualpath.config import Mode, Role, dump, parse
from dualpath.engine import models
from dualpath.engine.program import engine_argv

pytestmark = pytest.mark.unit

TWO_NODES = """
[model]
path = "/m"
[[nodes]]
name = "p"
role = "prefill"
base_port = 7000
[[nodes]]
name = "d"
role = "decode"
"""


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is refused: status 2, one line on stderr, nothing on stdout."""
    assert main.run(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(TWO_NODES)
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"dualpath {__version__}\n"


@pytest.mark.parametrize("command", ["up", "serve", "engine", "replay", "demo", "trace"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([command, "--help"]) == 0
    assert f"Usage: dualpath {command}" in capsys.readouterr().out


def test_wrong_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], cluster_file: Path, tmp_path: Path
) -> None:
    assert "nope" in failing(capsys, "nope")
    assert "--mode" in failing(capsys, "up", "--mode", "fast")
    assert "--role" in failing(capsys, "engine", "--config", str(cluster_file), "--rank", "0")
    assert "missing.toml: cannot be read" in failing(
        capsys, "serve", "--config", str(tmp_path / "missing.toml")
    )
    assert "describes the nodes" in failing(
        capsys, "up", "--config", str(cluster_file), "--prefill", "2"
    )
    assert "--snic: expected a rate" in failing(capsys, "demo", "--snic", "fast")
    assert "--model: expected smollm2 or tiny" in failing(capsys, "demo", "--model", "gpt")
    many = ["replay", "t.jsonl", "--url", "http://h", "--agents", str(10**20)]
    assert "--agents" in failing(capsys, *many)
    assert "--prefill" in failing(capsys, "up", "--prefill", "1000000")
    assert "--store: path: must name" in failing(capsys, "up", "--model", "/m", "--store", "")
    engine = ["engine", "--config", str(cluster_file), "--role", "decode"]
    assert "--rank: 1 does not exist" in failing(capsys, *engine, "--rank", "1")
    profile = ["profile", "--config", str(cluster_file), "--url"]
    assert "--url: must be such as" in failing(capsys, *profile, "http://")
    out = ["http://127.0.0.1:9", "--out", str(tmp_path)]
    assert "--out: " in failing(capsys, *profile, *out)
    assert "STORE: path:" in failing(capsys, "store", "stats", "s3://")


def test_oracle_is_refused_outside_benchmarks(
    capsys: pytest.CaptureFixture[str], cluster_file: Path
) -> None:
    line = failing(capsys, "up", "--config", str(cluster_file), "--mode", "oracle")
    assert "set benchmark = true" in line
    assert "benchmark = true" in failing(capsys, "up", "--mode", "oracle", "--model", "/m")


def test_open_ports_are_refused_outside_up(
    capsys: pytest.CaptureFixture[str], cluster_file: Path
) -> None:
    engine = ["engine", "--config", str(cluster_file), "--rank", "0", "--print-command"]
    assert "nodes: d: base_port must be set" in failing(capsys, *engine, "--role", "decode")
    assert "--control: expected HOST:PORT" in failing(
        capsys, *engine, "--role", "prefill", "--control", "8001"
    )
    cluster_file.write_text(TWO_NODES + "[front]\ncontrol_port = 0\n")
    assert "front.control_port: must be set" in failing(
        capsys, "serve", "--config", str(cluster_file)
    )


def test_the_printed_engine_command_has_this_engines_place(
    capsys: pytest.CaptureFixture[str], cluster_file: Path, tmp_path: Path
) -> None:
    status = main.run(
        [
            *("engine", "--config", str(cluster_file), "--role", "prefill", "--rank", "0"),
            *("--run-dir", str(tmp_path / "run"), "--control", "h:9", "--print-command"),
        ]
    )
    out = capsys.readouterr().out
    assert status == 0
    assert "--port 7000" in out
    for part in (f'"config_file": "{cluster_file}"', '"control": "h:9"', f'"{tmp_path}/run"'):
        assert part in out
    assert not (tmp_path / "run").exists()


def test_the_program_imports_no_engine() -> None:
    """Base installs have neither torch nor vLLM, and every command would start slowly."""
    code = (
        "import sys, dualpath.cli.main; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'nixl_cu12') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_default_cluster_survives_its_file(tmp_path: Path) -> None:
    config = default_cluster("/m", mode=Mode.BASIC, prefill=2, decode=1, store=tmp_path, port=0)
    assert [node.role for node in config.nodes] == [Role.PREFILL, Role.PREFILL, Role.DECODE]
    assert sum(node.engines for node in config.nodes) == 3
    assert len({node.name for node in config.nodes}) == 3
    assert parse(msgspec.toml.decode(dump(config))) == config


def test_engines_are_started_as_a_cluster_manager_would() -> None:
    argv = engine_argv(Path("/c.toml"), Path("/run"), Role.DECODE, 3)
    assert argv[1:3] == ["-m", "dualpath.cli.main"]
    assert argv[3:] == [
        *("engine", "--config", "/c.toml", "--run-dir", "/run", "--role", "decode", "--rank", "3")
    ]


def test_demo_talks_are_as_many_as_asked_and_share_no_prefix() -> None:
    talks = conversations(agents=30, turns=11, answer_tokens=7)
    assert len(talks) == 30
    assert all(len(talk.users) == 11 and set(talk.max_tokens) == {7} for talk in talks)
    # Stored blocks are whole: agents share one only if they agree in its first 64 tokens.
    assert len({talk.system[:60] for talk in talks}) == 30
    assert all("\\" not in talk.system for talk in talks)
    first, again = agents_of(talks)[0], agents_of(talks)[0]
    assert first.ask(0) == again.ask(0)


@pytest.mark.parametrize(
    ("left", "right", "agree"),
    [(100, 100, True), (100, 98, True), (100, 97, False), (0, 0, False), (None, 5, False)],
)
def test_two_modes_read_the_same_within_two_percent(
    left: int | None, right: int | None, agree: bool
) -> None:
    assert snic_agree(left, right) is agree
    assert snic_agree(right, left) is agree


def test_ratio() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None
    assert ratio(3.0, 0.0) is None


def test_bundled_models_are_named_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models.bundled("smollm2") is models.BundledModel.SMOLLM2
    assert models.bundled("org/model") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / "dualpath"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "dualpath"
    made = models.model_path(models.BundledModel.TINY)
    made.mkdir(parents=True)
    assert models.ensure(models.BundledModel.TINY) == made


def test_a_conversion_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho starting >&2\necho 'no such package' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(models.ModelError, match="cannot be prepared: no such package"):
        models.ensure(models.BundledModel.TINY, tmp_path)
    assert not models.model_path(models.BundledModel.TINY, tmp_path).exists()


def test_a_model_that_is_not_there_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], cluster_file: Path, tmp_path: Path
) -> None:
    file, empty = ["--config", str(cluster_file)], tmp_path / "empty"
    empty.mkdir()
    engine = ["engine", *file, "--role", "prefill", "--rank", "0", "--control", "h:9"]
    for command in (["up", *file], ["profile", *file], engine):
        assert "model.path: there is no folder /m" in failing(capsys, *command)
    assert "--model: there is no folder /n" in failing(capsys, "up", "--model", "/n")
    assert "has no config.json" in failing(capsys, "up", "--model", str(empty))
    cluster_file.write_text(TWO_NODES.replace("/m", str(empty)))
    for command in (["up", *file], engine):
        assert "has no config.json" in failing(capsys, *command)
