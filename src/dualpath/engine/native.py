"""Native libraries that vLLM's CPU build expects of the system and that a small system lacks.

``python -m dualpath.engine.native`` is run once by ``make setup``. The only such library is
libnuma: NIXL's wheel carries one under another name, so no administrator is needed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path
from typing import Final

_LIBNUMA: Final = "libnuma.so.1"
_NIXL: Final = "nixl-cu12"


def library_dir(prefix: str = sys.prefix) -> Path:
    """Folder of the links, searched by engines beside the system's (``LD_LIBRARY_PATH``)."""
    return Path(prefix) / "lib" / "dualpath-native"


def provide() -> str:
    """Make libnuma loadable for engines; one line saying how.

    Raises:
        FileNotFoundError: neither the system nor NIXL's wheel has it.
    """
    try:
        ctypes.CDLL(_LIBNUMA)
    except OSError:
        link = library_dir() / _LIBNUMA
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(_bundled())
        return f"{_LIBNUMA}: {link.resolve()}"
    return f"{_LIBNUMA}: the system's"


def _bundled() -> Path:
    try:
        files = importlib.metadata.files(_NIXL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libnuma") and ".so" in file.name:
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(
        f"vLLM's CPU build needs {_LIBNUMA}: install your system's libnuma1 package, "
        f"or {_NIXL} into this environment"
    )


if __name__ == "__main__":
    try:
        print(provide())
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
