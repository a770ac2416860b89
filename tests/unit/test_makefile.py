"""``make setup`` says what it does, and about how long each step takes, before it does it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_step_of_the_setup_is_announced() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "setup"]
    # "make test" runs this: its own settings are not meant for the one started here.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=30
    )
    lines = done.stdout.splitlines()
    said = [index for index, line in enumerate(lines) if re.match(r'echo "setup \d/4: ', line)]
    assert len(said) == 4
    for step, first in enumerate(said):
        text = " ".join(lines[first : first + 2])
        assert f"setup {step + 1}/4" in text
        assert re.search(r"second|minute", text)
    work = [
        index
        for index, line in enumerate(lines)
        if not line.startswith(("echo ", "touch ", "\t", "#"))
    ]
    assert said[0] < min(work)
    installs = [line for line in lines if " pip " in line and " install " in line]
    assert len(installs) == 3
    assert not any(re.search(r" (-q+|--quiet)\b", line) for line in installs)
