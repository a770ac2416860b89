"""Installs what peers need, pinned, into a folder of its own that only their processes see."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from dualpath.engine.models import cache_dir
from dualpath.lab.peers.kinds import PACKAGES, Peer

_INSTALL_S: Final = 600.0


class NotInstalled(RuntimeError):
    """A peer's packages cannot be had; one line says why."""


def packages_dir(peer: Peer, cache: Path | None = None) -> Path:
    """Where a peer's packages lie once they are installed; the name holds their versions."""
    names = [package.replace("==", "-") for package in PACKAGES[peer]]
    return (cache or cache_dir()) / "peers" / "+".join(names)


def ensure(peer: Peer, cache: Path | None = None) -> Path:
    """Folder for ``PYTHONPATH``; filled first when missing (up to 200 MB, from the package index).

    Without the packages' own dependencies: those would be gigabytes of CUDA libraries, and what is
    needed of them is there. The folder appears by one rename.

    Raises:
        NotInstalled: pip failed or took too long, or the folder cannot be made.
    """
    target = packages_dir(peer, cache)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    except OSError as error:
        raise NotInstalled(f"{peer.value}: {target.parent}: {error.strerror}") from None
    try:
        _install(peer, part)
        part.chmod(0o755)
        part.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process was quicker
            raise NotInstalled(f"{peer.value}: {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _install(peer: Peer, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-deps", "--target", str(folder), *PACKAGES[peer]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{peer.value}: pip is not done after {_INSTALL_S:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip ended with status {done.returncode}"
        raise NotInstalled(f"{peer.value}: {' '.join(PACKAGES[peer])}: {reason}")
