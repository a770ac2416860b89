"""Any known format to trajectories."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dualpath.workload.formats.bailian import Bailian
from dualpath.workload.formats.documents import documents
from dualpath.workload.formats.kv_cache_tester import KvCacheTester
from dualpath.workload.formats.messages import CHARS_PER_TOKEN, Messages
from dualpath.workload.formats.mooncake import IDLE_S, Mooncake
from dualpath.workload.trace import TraceError, Trajectory, parse_line


class Format(enum.Enum):
    """Names of the formats."""

    DUALPATH = "dualpath"
    KV_CACHE_TESTER = "kv-cache-tester"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    SHAREGPT = "sharegpt"
    OPENAI = "openai"


class Reader(Protocol):
    """Turns documents, given one after another in their order, into trajectories. For one task."""

    dropped: int
    clamped: int

    def read(self, document: bytes) -> Iterator[Trajectory]:
        """Trajectories that this document completes.

        Raises:
            TraceError: ``field: what is wrong``; the caller knows the place.
        """
        ...

    def finish(self) -> Iterator[Trajectory]:
        """What is still open once all is read."""
        ...


@dataclass(slots=True)
class _Own:
    """Our own format, for filtering and multiplying."""

    min_rounds: int
    dropped: int = 0
    clamped: int = 0

    def read(self, document: bytes) -> Iterator[Trajectory]:
        trajectory = parse_line(document)
        if len(trajectory.rounds) < self.min_rounds:
            self.dropped += 1
        else:
            yield trajectory

    def finish(self) -> Iterator[Trajectory]:
        return iter(())


@dataclass(frozen=True, slots=True)
class Options:
    """How to convert.

    Attributes:
        form: the format; None finds it out from the first document.
        blocks: keep block ids where the format has them.
        min_rounds: shorter trajectories are dropped.
        idle_s: request logs: a conversation without a request for so long is over.
        chars_per_token: for formats that hold text.
    """

    form: Format | None = None
    blocks: bool = True
    min_rounds: int = 1
    idle_s: float = IDLE_S
    chars_per_token: float = CHARS_PER_TOKEN


_SIGNS: Final[tuple[tuple[frozenset[str], Format], ...]] = (
    (frozenset({"id", "rounds"}), Format.DUALPATH),
    (frozenset({"id", "requests"}), Format.KV_CACHE_TESTER),
    (frozenset({"chat_id", "parent_chat_id", "input_length"}), Format.BAILIAN),
    (frozenset({"timestamp", "input_length", "hash_ids"}), Format.MOONCAKE),
    (frozenset({"conversations"}), Format.SHAREGPT),
    (frozenset({"messages"}), Format.OPENAI),
)
_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Conversion:
    """Converts one file or folder; iterate once.

    Attributes:
        form: the format, known once the first trajectory or error has come.
        trajectories: how many came so far.
    """

    def __init__(self, path: str | Path, options: Options) -> None:
        self.form: Format | None = options.form
        self.trajectories = 0
        self._path = path
        self._options = options
        self._reader: Reader | None = None

    @property
    def dropped(self) -> int:
        """Trajectories that were too short."""
        return 0 if self._reader is None else self._reader.dropped

    @property
    def clamped(self) -> int:
        """Appends taken as 1 token, see ``formats.rounds``."""
        return 0 if self._reader is None else self._reader.clamped

    def __iter__(self) -> Iterator[Trajectory]:
        """Trajectories in the order in which they end.

        Raises:
            TraceError: at the first thing wrong, one line with file, document and field; also when
                nothing is left in the end.
        """
        for where, document in documents(self._path):
            try:
                if self._reader is None:
                    self.form = self.form or detect(document)
                    self._reader = reader(self.form, self._options)
                for trajectory in self._reader.read(document):
                    self.trajectories += 1
                    yield trajectory
            except TraceError as error:
                raise TraceError(f"{where}: {error}") from None
        if self._reader is not None:
            for trajectory in self._reader.finish():
                self.trajectories += 1
                yield trajectory
        if not self.trajectories:
            raise TraceError(f"{self._path}: no trajectories are left of {self.dropped}")


def detect(document: bytes) -> Format:
    """The format of a document by the keys it has.

    Raises:
        TraceError: none of the known ones.
    """
    try:
        keys = _KEYS.decode(document).keys()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a JSON object: {error}") from None
    for sign, form in _SIGNS:
        if sign <= keys:
            return form
    names = ", ".join(form.value for form in Format)
    raise TraceError(f"format: not recognised by its keys {sorted(keys)[:8]}; known: {names}")


def reader(form: Format, options: Options) -> Reader:
    """A reader of a format."""
    match form:
        case Format.DUALPATH:
            return _Own(options.min_rounds)
        case Format.KV_CACHE_TESTER:
            return KvCacheTester(options.blocks, options.min_rounds)
        case Format.MOONCAKE:
            return Mooncake(options.blocks, options.idle_s, options.min_rounds)
        case Format.BAILIAN:
            return Bailian(options.blocks, options.idle_s, options.min_rounds)
        case Format.SHAREGPT | Format.OPENAI:
            return Messages(options.chars_per_token, options.min_rounds)
