"""What one process of a cluster did when, for ``timeline`` files that open together.

Every process writes a file of its own into the folder that the cluster file names
(``log.timeline``); ``merge`` makes one of them. Times are ``time.monotonic`` values, shown on the
wall clock so that files of several machines line up as well as those clocks do.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from dualpath.timeline import Timeline

SUFFIX: Final = ".trace.json"
_FLUSH_S: Final = 0.5


class Spans:
    """One process's part of the timeline. Thread safe.

    Args:
        folder: made when missing.
        process: name shown for it.

    Raises:
        OSError: the file cannot be created, or (from any call) written.
    """

    def __init__(self, folder: str | Path, process: str) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._process = process
        self._timeline = Timeline(
            path / f"{process}-{os.getpid()}{SUFFIX}", time.monotonic() - time.time()
        )
        self._lock = threading.Lock()
        self._lanes: dict[str, list[float]] = {}
        self._flushed_s = time.monotonic()

    def span(
        self,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Something on ``track`` took from ``start_s`` to ``end_s``; spans of a track must nest or
        follow each other."""
        self._timeline.span(self._process, track, name, start_s, end_s, args)
        # An engine may be ended in any way; what it drew until then is wanted.
        if (now_s := time.monotonic()) - self._flushed_s > _FLUSH_S:
            self._flushed_s = now_s
            self._timeline.flush()

    def lane(
        self,
        kind: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Like ``span`` for things that overlap: each goes on the first track of its kind that is
        free for all of its time."""
        with self._lock:
            lanes = self._lanes.setdefault(kind, [])
            free = (number for number, until_s in enumerate(lanes) if until_s <= start_s)
            number = next(free, len(lanes))
            lanes[number : number + 1] = [end_s]
        self.span(f"{kind} {number + 1}", name, start_s, end_s, args)

    def close(self) -> None:
        """End the file. Idempotent."""
        self._timeline.close()


def spans_for(folder: str, process: str) -> Spans | None:
    """Spans of a process; None when no folder is named.

    Raises:
        OSError: the file cannot be created.
    """
    return Spans(folder, process) if folder else None


def merge(folder: str | Path, target: str | Path) -> int:
    """One file of all that lie in ``folder``, beginning at zero; the number of events.

    Files of processes that were killed are taken as far as they go.

    Raises:
        OSError: a file cannot be read, or ``target`` not be written.
        ValueError: there is none, or one is no timeline.
    """
    files = sorted(Path(folder).glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(f"{folder}: no *{SUFFIX} files")
    first_us = min((event["ts"] for file in files for event in events(file) if "ts" in event),
                   default=0.0)  # fmt: skip
    count = 0
    with _open(Path(target), "wt") as out:
        out.write("[")
        for number, file in enumerate(files):
            for event in events(file):
                event["pid"] = event["pid"] + 1000 * number
                if "ts" in event:
                    event["ts"] = round(event["ts"] - first_us, 3)
                out.write("\n" if not count else ",\n")
                out.write(json.dumps(event, separators=(",", ":")))
                count += 1
        out.write("\n]\n")
    return count


def events(file: Path) -> Iterator[dict[str, Any]]:
    """Events of a timeline file, one a line, up to a torn last one. An empty file has none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no timeline.
    """
    with _open(file, "rt") as lines:
        first = next(lines, "")
        if first and first.strip() != "[":
            raise ValueError(f"{file}: not a timeline")
        for line in lines:
            text = line.strip().rstrip(",")
            if not text or text == "]":
                continue
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return  # the writer was killed in the middle of it


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    return path.open(mode[0], encoding="utf-8")
