"""What each request of a run did, one JSON line each, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

FILE_NAME: Final = "requests.jsonl"


class RecordError(ValueError):
    """A record file cannot be used; one line naming file and line."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    Attributes:
        agent, round: its place in the run; unique together.
        name: the trajectory's or conversation's.
        prompt_digest: hash of the prompt.
        prompt_tokens, cached_tokens: as the server counts them (or as sent); None when unknown.
        asked_tokens, completion_tokens: most tokens wanted, tokens got.
        token_ids, text, finish_reason: the answer.
        start_s: since the run's start; ttft_s, ttst_s, tpot_s, total_s: see ``client.Answer``.
        attempts: tries.
        failure, error: kind and text when there is no usable answer, else empty.
        headers: ``x-dualpath-*`` of the response.
    """

    agent: int
    round: int
    name: str
    prompt_digest: str
    asked_tokens: int
    start_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    text: str = ""
    finish_reason: str = ""
    ttft_s: float | None = None
    ttst_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None
    attempts: int = 1
    failure: str = ""
    error: str = ""
    headers: dict[str, str] = {}

    @property
    def ok(self) -> bool:
        """Whether there is an answer."""
        return not self.failure


class RecordWriter:
    """Appends records to ``folder/requests.jsonl``, which must not exist yet. One owner.

    Each line is written out at once: a run that is killed leaves all it had.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            RecordError: the folder already holds a run, or cannot be written.
        """
        self._path = path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise RecordError(f"{path}: exists already; name another folder") from None
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, record: RequestRecord) -> None:
        """Append one record.

        Raises:
            RecordError: it cannot be written.
        """
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            raise RecordError(f"{self._path}: cannot be written: {error.strerror}") from None


def read_records(path: str | Path) -> Iterator[RequestRecord]:
    """Records of a file, or of the ``requests.jsonl`` in a folder.

    Raises:
        RecordError: unreadable, or a line is not a record.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    decoder = msgspec.json.Decoder(RequestRecord)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise RecordError(f"{path}:{number}: not a record: {error}") from None
                yield record
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
