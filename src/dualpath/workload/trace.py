"""Trace files: what agents ask for, as token counts.

JSON lines, one trajectory a line: ``{"id": str, "rounds": [[append, gen, latency_s|null], ...]}``.
Unknown keys are kept. gzip is recognised by its first bytes, whatever the name. Reading is
streaming: memory does not grow with the number of trajectories.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, cast

import msgspec
from msgspec import Meta

_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_LEVEL: Final = 6

Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TraceError(ValueError):
    """A trace cannot be used; one line: ``file:line: field: what is wrong``."""


class Round(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):  # compact on disk and in memory
    """One turn of an agent.

    Attributes:
        append_tokens: tokens added to everything before.
        gen_tokens: tokens generated; 0 for a turn that only adds context.
        tool_latency_s: client's time before the next round; None when there is none or unknown.
    """

    append_tokens: Tokens
    gen_tokens: Tokens
    tool_latency_s: Annotated[float, Meta(ge=0)] | None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's life.

    Attributes:
        id: name.
        rounds: its turns, at least one; the first one's ``append_tokens`` is at least 1.
        extra: all other keys of its line, as they stood.
    """

    id: str
    rounds: tuple[Round, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    def prompts_tokens(self) -> Iterator[int]:
        """Prompt length of every round: everything before it plus its append."""
        context = 0
        for item in self.rounds:
            context += item.append_tokens
            yield context
            context += item.gen_tokens

    @property
    def total_tokens(self) -> int:
        """Length of the context after the last answer."""
        return sum(item.append_tokens + item.gen_tokens for item in self.rounds)

    def cut(self, max_tokens: int) -> Trajectory | None:
        """The rounds before the first one whose answer would end beyond ``max_tokens``; None when
        there is none. Block ids are cut along."""
        context = kept = 0
        for item in self.rounds:
            context += item.append_tokens + item.gen_tokens
            if context > max_tokens:
                break
            kept += 1
        if kept == len(self.rounds):
            return self
        if not kept:
            return None
        last = self.rounds[kept - 1]
        rounds = (*self.rounds[: kept - 1], Round(last.append_tokens, last.gen_tokens, None))
        extra = dict(self.extra)
        if isinstance(extra.get("blocks"), list):
            extra["blocks"] = extra["blocks"][:kept]
        return Trajectory(self.id, rounds, extra)


_LINE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ID: Final = msgspec.json.Decoder(Annotated[str, Meta(min_length=1)])
_ROUNDS: Final = msgspec.json.Decoder(Annotated[tuple[Round, ...], Meta(min_length=1)])


def parse_line(line: bytes | str) -> Trajectory:
    """One line of a trace file.

    Raises:
        TraceError: ``field: what is wrong`` (the caller knows file and line).
    """
    try:
        raw = _LINE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a JSON object: {error}") from None
    for name in ("id", "rounds"):
        if name not in raw:
            raise TraceError(f"{name}: is missing")
    try:
        name = "id"
        identity = _ID.decode(raw.pop("id"))
        name = "rounds"
        rounds = _ROUNDS.decode(raw.pop("rounds"))
        if rounds[0].append_tokens == 0:
            raise TraceError("rounds[0][0]: the first prompt must have at least 1 token, got 0")
        extra: dict[str, Any] = {}
        for name, value in raw.items():
            extra[name] = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(_field_first(name, str(error))) from None
    return Trajectory(identity, rounds, extra)


def read_trace(path: str | Path) -> Iterator[Trajectory]:
    """Trajectories of a file, one at a time.

    Raises:
        TraceError: at the first thing wrong, trajectories before it having been yielded: the file
            is unreadable, cut short, empty, or a line is not a trajectory.
    """
    number = 0
    found = False
    try:
        with open_plain_or_gzip(Path(path)) as stream:
            for number, line in enumerate(stream, 1):
                if line.isspace():
                    continue
                try:
                    trajectory = parse_line(line)
                except TraceError as error:
                    raise TraceError(f"{path}:{number}: {error}") from None
                found = True
                yield trajectory
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number + 1}: gzip stream cut or damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not found:
        raise TraceError(f"{path}: holds no trajectories")


def format_line(trajectory: Trajectory) -> bytes:
    """The line (with its newline) that ``parse_line`` reads back to an equal trajectory."""
    body = {"id": trajectory.id, **trajectory.extra, "rounds": trajectory.rounds}
    return msgspec.json.encode(body) + b"\n"


def write_trace(path: str | Path, trajectories: Iterable[Trajectory]) -> int:
    """Write a file, gzipped when its name ends in ``.gz``, and return how many were written.

    The file appears whole or not at all. Equal trajectories give equal bytes.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    count = 0
    try:
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(partial.open("wb"))
            stream: BinaryIO = plain
            if target.suffix == ".gz":
                # No name and no time in the header: they would make equal traces differ.
                packed = gzip.GzipFile("", "wb", _GZIP_LEVEL, plain, mtime=0)
                stream = cast(BinaryIO, stack.enter_context(packed))
            for trajectory in trajectories:
                stream.write(format_line(trajectory))
                count += 1
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def open_plain_or_gzip(path: Path) -> BinaryIO:
    """A file for reading, unpacked when its first bytes say gzip.

    Raises:
        OSError: it cannot be opened.
    """
    plain = path.open("rb")
    try:
        zipped = plain.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        plain.seek(0)
        if not zipped:
            return plain
    except BaseException:  # closed whatever stopped us, then passed on
        plain.close()
        raise
    plain.close()
    return cast(BinaryIO, gzip.open(path, "rb"))


def _field_first(name: str, message: str) -> str:
    """msgspec's ``text - at `$[3][2]` `` as ``rounds[3][2]: text``."""
    text, mark, where = message.rpartition(" - at `$")
    if not mark:
        return f"{name}: {message}"
    return f"{name}{where.rstrip('`')}: {text.replace('`', '')}"
