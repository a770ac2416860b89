"""The raw engine command in the README is the one that ``dualpath engine`` becomes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from dualpath import config as cluster
from dualpath.config import Role
from dualpath.engine.launch import Device, EnginePlace, engine_command

pytestmark = pytest.mark.unit
README = Path(__file__).parents[2] / "README.md"
SERVER = "vllm.entrypoints.openai.api_server"


def words_of_readme() -> tuple[dict[str, str], list[str]]:
    """Settings before the program, and the program's words."""
    (block,) = (part for part in README.read_text().split("```") if SERVER in part)
    words = shlex.split(block.removeprefix("sh").replace("\\\n", " "))
    program = words.index("python")
    return dict(word.split("=", 1) for word in words[:program]), words[program:]


def test_the_readme_shows_the_command_as_it_is() -> None:
    described = cluster.parse(
        {
            "model": {"path": "/models/SmolLM2-135M-Instruct", "max_model_len": 4096},
            "nodes": [
                {"name": "p", "role": "prefill", "base_port": 8101},
                {"name": "d", "role": "decode", "base_port": 8201},
            ],
        }
    )
    place = EnginePlace(
        Path("/etc/dualpath/cluster.toml"), Role.PREFILL, 0, 8101, "127.0.0.1:8001",
        Path("/run/dualpath"),
    )  # fmt: skip
    made = engine_command(described, place, python="python", device=Device.CPU, inherited={})
    settings, shown = words_of_readme()
    at = shown.index("--kv-transfer-config") + 1
    expected = list(made.argv)
    assert json.loads(shown.pop(at)) == json.loads(expected.pop(at))
    assert shown == expected
    # Where the model and the libraries lie decides about the others.
    assert settings == {name: made.env[name] for name in settings}
    assert {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} <= settings.keys()
