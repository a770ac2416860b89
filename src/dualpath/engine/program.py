"""How ``dualpath engine`` is started by whatever supervises engines on a machine."""

from __future__ import annotations

import sys
from pathlib import Path

from dualpath.config import Role


def engine_argv(config_file: Path, run_dir: Path, role: Role, rank: int) -> list[str]:
    """``dualpath engine`` for one engine, with this interpreter."""
    return [
        *(sys.executable, "-m", "dualpath.cli.main", "engine"),
        *("--config", str(config_file), "--run-dir", str(run_dir)),
        *("--role", role.value, "--rank", str(rank)),
    ]
