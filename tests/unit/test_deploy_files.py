"""What lies in deploy/ fits the program: cluster files, unit files, manifests, options."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
from typer.testing import CliRunner

from dualpath import config as cluster
from dualpath.cli.main import build
from dualpath.config import ClusterConfig, LogFormat, Role

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST = (DEPLOY / "kubernetes" / "dualpath.yaml").read_text()


def in_manifest() -> ClusterConfig:
    """The cluster file in the ConfigMap."""
    text = MANIFEST.partition("  cluster.toml: |\n")[2].partition("\n---")[0]
    return cluster.parse(msgspec.toml.decode(dedent(text)))


def test_the_cluster_file() -> None:
    described = cluster.load(DEPLOY / "cluster.toml")
    assert described.log.format is LogFormat.JSON
    assert described.security.tls_cert_file
    for role in Role:
        assert [node.name for node, _ in described.engines(role)] == [
            name for name in ("p0", "p1", "d0", "d1") if name[0] == role.value[0] for _ in "ab"
        ]


def test_traffic_classes_can_be_made_of_it(tmp_path: Path) -> None:
    config = ["--config", str(DEPLOY / "cluster.toml")]
    done = CliRunner().invoke(build(), ["qos", "render", *config, "--out", str(tmp_path / "qos")])
    assert done.exit_code == 0, done.output
    written = [file.read_text() for file in (tmp_path / "qos").rglob("*") if file.is_file()]
    assert any("20480" in text for text in written)


def test_the_manifest() -> None:
    described = in_manifest()
    for role in Role:
        engines = described.engines(role)
        replicas = re.search(
            rf"name: dualpath-{role.value},.*?replicas: (\d+)", MANIFEST, re.DOTALL
        )
        assert replicas is not None
        assert int(replicas[1]) == len(engines)
        for rank, (node, _) in enumerate(engines):
            assert node.host.startswith(f"dualpath-{role.value}-{rank}.engines.")
            assert node.base_port == 8100
    assert described.front.control_host.startswith("dualpath-front-0.front.")
    assert {described.front.port, described.front.control_port} == {8000, 8001}
    for path in ("/health", "/ready"):
        assert f"path: {path}" in MANIFEST


def test_commands_have_the_options_that_are_used() -> None:
    helps = {
        name: CliRunner().invoke(build([name]), [name, "--help"], env={"COLUMNS": "200"}).output
        for name in ("serve", "engine")
    }
    used = 0
    for file in (DEPLOY / "systemd").iterdir():
        name = "engine" if "engine" in file.name else "serve"
        (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)", file.read_text(), re.MULTILINE)
        used += check(command, helps[name])
    for name, command in re.findall(r"dualpath,? (serve|engine)(.*(?:\n +--.*)*)", MANIFEST):
        used += check(command, helps[name])
    program = (DEPLOY / "ray" / "launch.py").read_text()
    used += check(" ".join(re.findall(r'"(--[a-z-]+)"', program)), helps["engine"])
    assert used == 1 + 4 + 1 + 2 * 4 + 4


def check(command: str, text: str) -> int:
    options = re.findall(r"(?<![\w-])--[a-z-]+", command)
    for option in options:
        assert option in text, option
    return len(options)


def test_the_ray_program_is_python() -> None:
    tree = ast.parse((DEPLOY / "ray" / "launch.py").read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert names == {"Process"}


def test_every_file_is_mentioned_in_the_guide() -> None:
    guide = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for file in DEPLOY.rglob("*"):
        if file.is_file():
            assert f"../deploy/{file.relative_to(DEPLOY)}" in guide, file
