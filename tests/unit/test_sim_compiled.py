"""``make compiled`` changes how long the simulator takes and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RUN = """
import json
from dualpath.sim import core, preset, simulate
from dualpath.workload.synth import ROWS, synthesise
compiled = not core.__file__.endswith(".py")
answers = []
for mode in ("basic", "alternating", "dualpath", "split", "oracle"):
    result = simulate(preset("ds-660b-1p2d", mode), synthesise(ROWS["32k"], 20), agents=30)
    answer = result.to_json()
    for name in ("wall_s", "scheduler_cpu_s", "scheduler_cores"):
        del answer[name]
    answers.append([answer, list(result.samples.ttft_s)])
print(json.dumps([compiled, answers]))
"""


def run(sources: Path) -> str:
    env = os.environ | {"PYTHONPATH": str(sources)}
    return subprocess.run(
        [sys.executable, "-c", RUN],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_compiled_gives_the_same_results(tmp_path: Path) -> None:
    if shutil.which("gcc") is None or shutil.which("make") is None:
        pytest.skip("needs gcc and make")
    target = tmp_path / "compiled"
    subprocess.run(
        # The environment that runs this test is the one to build with, however old its stamp is.
        ["make", "-o", f"{sys.prefix}/.dualpath-setup", "compiled", f"COMPILED={target}",
         f"VENV={sys.prefix}"],
        env=os.environ | {"MYPYC_OPT_LEVEL": "0"},  # sooner compiled, same code
        cwd=ROOT, check=True, timeout=700,
    )  # fmt: skip
    plain, compiled = run(ROOT / "src"), run(target)
    assert plain.startswith("[false, ") and compiled.startswith("[true, ")
    assert plain.partition(", ")[2] == compiled.partition(", ")[2]
