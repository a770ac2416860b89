"""A run's timeline in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

Written as it happens, one event a line, so that a run of a million events needs no memory for them
and a file whose writer was killed still opens: the format allows the closing bracket to be missing.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

_MICROSECONDS = 1e6


class Timeline:
    """Spans on named tracks of named processes, and counters. Thread safe.

    Times are seconds on any clock that all writers of one file share; they are shown from the
    value of ``origin_s`` on.

    Args:
        path: the file; a name that ends in ``.gz`` is compressed.
        origin_s: the moment shown as zero.

    Raises:
        OSError: the file cannot be created, or (from any call) written.
    """

    def __init__(self, path: str | Path, origin_s: float = 0.0) -> None:
        self.path = Path(path)
        self._origin_s = origin_s
        self._lock = threading.Lock()
        self._file: IO[str] | None = (
            gzip.open(self.path, "wt", encoding="utf-8")  # noqa: SIM115 - closed by close()
            if self.path.suffix == ".gz"
            else self.path.open("w", encoding="utf-8")
        )
        self._file.write("[")
        self._first = True
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}

    def span(
        self,
        process: str,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Something took from ``start_s`` to ``end_s``. Spans of one track must nest or follow."""
        event: dict[str, Any] = {
            "ph": "X",
            "name": name,
            "ts": self._microseconds(start_s),
            "dur": max(0.0, (end_s - start_s) * _MICROSECONDS),
        }
        if args:
            event["args"] = dict(args)
        self._write(event, process, track)

    def instant(self, process: str, track: str, name: str, at_s: float) -> None:
        """Something happened at one moment."""
        self._write(
            {"ph": "i", "s": "t", "name": name, "ts": self._microseconds(at_s)}, process, track
        )

    def counter(self, process: str, name: str, at_s: float, values: Mapping[str, float]) -> None:
        """Values that hold from ``at_s`` until the next call with the same name."""
        self._write(
            {"ph": "C", "name": name, "ts": self._microseconds(at_s), "args": dict(values)},
            process,
            None,
        )

    def flush(self) -> None:
        """Hand what was written so far to the system, so that it survives this process."""
        with self._lock:
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """End the file; whatever is written later is dropped. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _microseconds(self, at_s: float) -> float:
        return round((at_s - self._origin_s) * _MICROSECONDS, 3)

    def _write(self, event: dict[str, Any], process: str, track: str | None) -> None:
        with self._lock:
            if self._file is None:
                return
            pid = self._process(process)
            event["pid"] = pid
            event["tid"] = 0 if track is None else self._track(pid, track)
            self._emit(event)

    def _process(self, name: str) -> int:
        pid = self._processes.get(name)
        if pid is None:
            pid = self._processes[name] = len(self._processes) + 1
            self._name("process_name", pid, 0, name)
        return pid

    def _track(self, pid: int, name: str) -> int:
        tid = self._tracks.get((pid, name))
        if tid is None:
            tid = self._tracks[pid, name] = len(self._tracks) + 1
            self._name("thread_name", pid, tid, name)
        return tid

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._emit({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def _emit(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write("\n" if self._first else ",\n")
        self._first = False
        self._file.write(json.dumps(event, separators=(",", ":")))
