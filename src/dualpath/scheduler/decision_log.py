"""A log of everything a scheduler was told and what it decided, as JSON lines.

Pure: a ``LoggedScheduler`` hands lines to a function of the caller's, ``replay`` takes lines. The
same calls give the same decisions, so a log from a live system can be replayed anywhere, and one
that does not replay shows a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from dualpath.config import Role
from dualpath.scheduler.scheduler import Scheduler
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.types import Decisions, EngineReport, EngineSpec, Rejection, Request

LOG_VERSION: Final = 1


class Record(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of every line; fields are the call's arguments and its result."""


class Started(Record, frozen=True, tag="started"):
    """First line, and the first one of every later scheduler whose log goes into the same file."""

    settings: SchedulerSettings
    version: int = LOG_VERSION


class Added(Record, frozen=True, tag="added"):
    """``add_engine``."""

    spec: EngineSpec


class Removed(Record, frozen=True, tag="removed"):
    """``remove_engine``."""

    engine: str
    dropped: tuple[str, ...]


class Drained(Record, frozen=True, tag="drained"):
    """``drain``."""

    engine: str


class Undrained(Record, frozen=True, tag="undrained"):
    """``undrain``."""

    engine: str


class Submitted(Record, frozen=True, tag="submitted"):
    """``submit``."""

    request: Request
    rejection: Rejection | None


class Fetched(Record, frozen=True, tag="fetched"):
    """``fetch``."""

    group: str
    reports: tuple[EngineReport, ...]
    now_s: float
    decisions: Decisions


class ReadDone(Record, frozen=True, tag="read_done"):
    """``read_done``."""

    rid: str
    side: Role
    tokens: int | None


class PrefillDone(Record, frozen=True, tag="prefill_done"):
    """``prefill_done``."""

    rid: str


class Finished(Record, frozen=True, tag="finished"):
    """``finish``."""

    rid: str


class Cancelled(Record, frozen=True, tag="cancelled"):
    """``cancel``."""

    rid: str


AnyRecord = (
    Started | Added | Removed | Drained | Undrained | Submitted | Fetched | ReadDone | PrefillDone
    | Finished | Cancelled
)  # fmt: skip
_decoder: Final[msgspec.json.Decoder[AnyRecord]] = msgspec.json.Decoder(AnyRecord)


class ReplayError(ValueError):
    """The log is not one, or replaying it gave something else; the message names the line."""


def encode(record: AnyRecord) -> str:
    """One line, without its end."""
    return msgspec.json.encode(record).decode()


def starts(line: str) -> bool:
    """Whether an encoded line is a ``Started``, with which a log can begin."""
    return line.startswith('{"event":"started"')


def decode(line: str) -> AnyRecord:
    """The record of one line.

    Raises:
        ReplayError: it is not one.
    """
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ReplayError(f"not a decision record: {error}") from error


class LoggedScheduler(Scheduler):
    """A scheduler that also writes down every call that had an effect, after it had it.

    ``write`` gets one line without its end; it is called in the scheduler's thread and must not
    block. What it raises reaches the caller of the scheduler, whose call has then been carried out.
    """

    def __init__(self, settings: SchedulerSettings, write: Callable[[str], object]) -> None:
        super().__init__(settings)
        self._write = write
        self._log(Started(settings))

    def _log(self, record: AnyRecord) -> None:
        self._write(encode(record))

    def add_engine(self, spec: EngineSpec) -> None:
        """See ``Scheduler``."""
        super().add_engine(spec)
        self._log(Added(spec))

    def remove_engine(self, name: str) -> list[str]:
        """See ``Scheduler``."""
        dropped = super().remove_engine(name)
        self._log(Removed(name, tuple(dropped)))
        return dropped

    def drain(self, name: str) -> None:
        """See ``Scheduler``."""
        super().drain(name)
        self._log(Drained(name))

    def undrain(self, name: str) -> None:
        """See ``Scheduler``."""
        super().undrain(name)
        self._log(Undrained(name))

    def submit(self, request: Request) -> Rejection | None:
        """See ``Scheduler``."""
        rejection = super().submit(request)
        self._log(Submitted(request, rejection))
        return rejection

    def fetch(self, group: str, reports: Sequence[EngineReport], now_s: float) -> Decisions:
        """See ``Scheduler``."""
        decisions = super().fetch(group, reports, now_s)
        self._log(Fetched(group, tuple(reports), now_s, decisions))
        return decisions

    def read_done(self, rid: str, side: Role, tokens: int | None = None) -> None:
        """See ``Scheduler``."""
        super().read_done(rid, side, tokens)
        self._log(ReadDone(rid, side, tokens))

    def prefill_done(self, rid: str) -> None:
        """See ``Scheduler``."""
        super().prefill_done(rid)
        self._log(PrefillDone(rid))

    def finish(self, rid: str) -> None:
        """See ``Scheduler``."""
        super().finish(rid)
        self._log(Finished(rid))

    def cancel(self, rid: str) -> None:
        """See ``Scheduler``."""
        super().cancel(rid)
        self._log(Cancelled(rid))


def replay(lines: Iterable[str]) -> list[Decisions]:
    """Make every call of a log again on a fresh scheduler; a log that was started again (by a
    change of mode or by a new front) goes on with another fresh one.

    Empty lines are skipped; a last line that was cut off in the middle is an error like any other.

    Returns:
        The decisions of every fetch, all equal to the recorded ones.

    Raises:
        ReplayError: a line is no record, the first one is not ``Started`` of this version, or a
            call gave another result than the log says.
    """
    scheduler: Scheduler | None = None
    decisions: list[Decisions] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = decode(line)
        except ReplayError as error:
            raise ReplayError(f"line {number}: {error}") from error
        if isinstance(record, Started):
            if record.version != LOG_VERSION:
                raise ReplayError(f"line {number}: version {record.version}, not {LOG_VERSION}")
            scheduler = Scheduler(record.settings)
            continue
        if scheduler is None:
            raise ReplayError(f"line {number}: the log does not begin with its settings")
        recorded, got = _again(scheduler, record)
        if recorded != got:
            raise ReplayError(f"line {number}: recorded {recorded}, replayed {got}")
        if isinstance(got, Decisions):
            decisions.append(got)
    return decisions


def _again(scheduler: Scheduler, record: AnyRecord) -> tuple[object, object]:
    """Make the call of ``record``; its recorded and its new result."""
    match record:
        case Removed(engine, dropped):
            return dropped, tuple(scheduler.remove_engine(engine))
        case Submitted(request, rejection):
            return rejection, scheduler.submit(request)
        case Fetched(group, reports, now_s, decisions):
            return decisions, scheduler.fetch(group, reports, now_s)
        case Added(spec):
            scheduler.add_engine(spec)
        case Drained(engine):
            scheduler.drain(engine)
        case Undrained(engine):
            scheduler.undrain(engine)
        case ReadDone(rid, side, tokens):
            scheduler.read_done(rid, side, tokens)
        case PrefillDone(rid):
            scheduler.prefill_done(rid)
        case Finished(rid):
            scheduler.finish(rid)
        case Cancelled(rid):
            scheduler.cancel(rid)
        case _:
            raise ReplayError(f"{type(record).__name__} is not a call")
    return None, None
