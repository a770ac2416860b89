"""JSON documents of a file or a folder, one at a time: a file may hold one object, an array of
them, or one a line, and may be gzipped. Memory is that of the largest single object."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dualpath.workload.trace import TraceError, open_plain_or_gzip

_CHUNK_BYTES: Final = 1 << 20
_STRUCTURE: Final = re.compile(rb'["{}\[\]\\]')
_OPENING: Final = b"{["
_CLOSING: Final = b"}]"


def documents(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """Each document's place (for errors) and its bytes.

    Args:
        path: a file, or a folder whose ``*.json`` and ``*.jsonl`` files (``.gz`` too) are read in
            order of their names.

    Raises:
        TraceError: unreadable, damaged, empty, or not JSON at its outermost level.
    """
    source = Path(path)
    if not source.is_dir():
        yield from _file(source)
        return
    names = sorted(
        entry for entry in source.iterdir() if re.search(r"\.jsonl?(\.gz)?$", entry.name)
    )
    if not names:
        raise TraceError(f"{path}: holds no .json or .jsonl files")
    for name in names:
        yield from _file(name)


def _file(path: Path) -> Iterator[tuple[str, bytes]]:
    splitter = _Splitter()
    number = 0
    try:
        with open_plain_or_gzip(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                for document in splitter.feed(chunk):
                    number += 1
                    yield f"{path}: document {number}", document
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: gzip stream cut or damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise TraceError(f"{path}: document {number + 1}: {error}") from None
    if splitter.unfinished:
        raise TraceError(f"{path}: document {number + 1}: ends in the middle")
    if not number:
        raise TraceError(f"{path}: holds no JSON objects")


class _Splitter:
    """Cuts a stream into objects, those of an outermost array one by one. Only brackets and
    strings are looked at; whoever decodes an object finds what else is wrong."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._depth = 0
        self._start = 0
        self._in_string = False
        self._in_array = False

    @property
    def unfinished(self) -> bool:
        """Whether an object, or the array around them, is still open."""
        return self._depth > 0 or self._in_array

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Objects that ``chunk`` completes.

        Raises:
            ValueError: something that is no object stands at the outermost level.
        """
        self._buffer += chunk
        at = self._scanned
        while match := _STRUCTURE.search(self._buffer, at):
            at = match.end()
            mark = match[0]
            if self._in_string:
                if mark == b"\\":
                    if at == len(self._buffer):  # the escaped byte is in the next chunk
                        at -= 1
                        break
                    at += 1
                elif mark == b'"':
                    self._in_string = False
                continue
            if self._depth == 0:
                self._outside(mark, match.start())
            elif mark == b'"':
                self._in_string = True
            elif mark in _OPENING:
                self._depth += 1
            elif mark in _CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    yield bytes(self._buffer[self._start : at])
                    self._start = at
        else:
            at = len(self._buffer)
        if self._depth == 0:
            self._only_separators(bytes(self._buffer[self._start : at]))
            self._start = at
        del self._buffer[: self._start]
        self._scanned = at - self._start
        self._start = 0

    def _outside(self, mark: bytes, at: int) -> None:
        self._only_separators(bytes(self._buffer[self._start : at]))
        self._start = at
        if mark == b"{":
            self._depth = 1
        elif mark == b"[" and not self._in_array:
            self._in_array = True
            self._start = at + 1
        elif mark == b"]" and self._in_array:
            self._in_array = False
            self._start = at + 1
        else:
            raise ValueError(f"a JSON object is wanted, found {mark.decode()!r}")

    def _only_separators(self, between: bytes) -> None:
        rest = between.strip(b" \t\r\n,\xef\xbb\xbf")
        if rest:
            raise ValueError(f"a JSON object is wanted, found {rest[:20]!r}")
