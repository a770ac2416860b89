"""Copy engine ``host``: the device cache is host memory (vLLM on CPU)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from dualpath.transfer.copying import (
    Copy,
    CopyEngine,
    CopyFailed,
    Fence,
    Finished,
    Runs,
    merge_runs,
)
from dualpath.transfer.descriptors import Descriptors

_HOLD_BELOW_BYTES: Final = 128 << 10
"""Smaller runs are copied without giving the interpreter lock away: each time it is given away,
a model thread that is busy in Python keeps it for up to 5 ms. A larger one takes longer than
10 us, which others may use. docs/copy-engines.md has the measurement."""


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], Any]:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


class HostCopyEngine(CopyEngine):
    """memmove, over when ``submit`` returns. See ``CopyEngine``."""

    name = "host"

    def __init__(self) -> None:
        self._holding = _memmove(ctypes.PyDLL(None))
        self._releasing = _memmove(ctypes.CDLL(None))

    def fence(self, stream: int) -> Fence | None:
        """See ``CopyEngine``: the CPU runs no work behind its launcher's back."""
        return None

    def submit(self, runs: Runs, after: Sequence[Fence] = ()) -> Copy:
        """See ``CopyEngine``.

        Raises:
            CopyFailed: a fence is not reached. The CPU's own work is over before anybody asks.
        """
        for fence in after:
            if not fence.reached():
                raise CopyFailed("a copy on the CPU cannot wait for a device")
        if isinstance(runs, Descriptors):
            parts: Iterable[tuple[int, int, int]] = zip(
                runs.local.tolist(), runs.remote.tolist(), runs.sizes.tolist(), strict=True
            )
        else:
            # Arrays would cost more than they save.
            parts = ((run.source, run.target, run.nbytes) for run in merge_runs(runs))
        holding, releasing = self._holding, self._releasing
        total = 0
        for source, target, nbytes in parts:
            (holding if nbytes < _HOLD_BELOW_BYTES else releasing)(target, source, nbytes)
            total += nbytes
        return Finished(total)

    def close(self) -> None:
        """See ``CopyEngine``: nothing is held."""
