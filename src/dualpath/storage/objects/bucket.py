"""Objects of one bucket: every request with a bound, every refusal as an errno.

Reads, listings and removals are sent again by the client library. A write is sent again by us:
after a failure nobody knows whether it arrived, so a later "exists already" may be our own doing,
and the caller has to be told.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import S3Store

from dualpath.config import S3Config

T = TypeVar("T")

_LIST_PAGE: Final = 1000
"""Objects in a page: what a server gives at most."""
_CONNECT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_NO_ROOM: Final = ("code: 507", "InsufficientStorage", "StorageFull", "QuotaExceeded", "BucketFull")
"""How servers say that they have no room; S3's own protocol has no word for it."""
_FAULTS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (FileNotFoundError, errno.ENOENT),  # obstore's NotFoundError is one of these
    (exceptions.AlreadyExistsError, errno.EEXIST),
    (exceptions.PreconditionError, errno.ESTALE),
    (exceptions.PermissionDeniedError, errno.EACCES),
    (exceptions.UnauthenticatedError, errno.EACCES),
)


class ObjectError(OSError):
    """A request that failed, for good or after being sent again.

    Its errno: ENOENT, no such object or bucket; EEXIST, ESTALE, a condition does not hold;
    EACCES, not allowed; ENOSPC, no room; EIO, anything else.

    Attributes:
        uncertain: an earlier sending of the same write failed without an answer and may have
            been carried out.
    """

    def __init__(self, code: int, text: str, name: str, *, uncertain: bool = False) -> None:
        super().__init__(code, text, name)
        self.uncertain = uncertain


@dataclass(frozen=True, slots=True)
class Found:
    """An object that is there.

    Attributes:
        name: below the store's prefix.
        size_bytes: length.
        etag: changes with the content.
        modified_s: when it was written, by the server's clock, seconds since 1970.
    """

    name: str
    size_bytes: int
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True)
class Download:
    """The head of an answer whose body has not been taken yet."""

    found: Found
    _answer: Any

    def body(self) -> memoryview:
        """The content, in memory of its own. Once only.

        Raises:
            ObjectError: it could not be received.
        """
        view = memoryview(_call(self.found.name, self._answer.bytes))
        return view if view.format == "B" else view.cast("B")


class Bucket:
    """Objects below one prefix of one bucket. Any thread may call; calls block.

    A call lasts at most ``longest_s``.

    Args:
        name: the bucket.
        prefix: without slashes at its ends; may be empty.
        settings: server and bounds.
    """

    def __init__(self, name: str, prefix: str, settings: S3Config) -> None:
        self.where = f"s3://{name}/{prefix}" if prefix else f"s3://{name}"
        self._prefix = prefix
        self._retries = settings.retries
        self.longest_s = (settings.retries + 1) * (settings.timeout + _LONGEST_PAUSE_S)
        config: dict[str, Any] = {"conditional_put": "etag"}
        if settings.endpoint:
            config["endpoint"] = settings.endpoint
        if settings.region:
            config["region"] = settings.region

        def client(retries: int) -> S3Store:
            return S3Store(
                name,
                prefix=prefix or None,
                config=config,  # type: ignore[arg-type]
                client_options={
                    "allow_http": settings.allow_http,
                    "timeout": timedelta(seconds=settings.timeout),
                    "connect_timeout": timedelta(seconds=min(_CONNECT_S, settings.timeout)),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=self.longest_s),
                    "backoff": {
                        "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                        "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                    },
                },
            )

        try:
            self._reader, self._writer = client(settings.retries), client(0)
        except (exceptions.BaseError, ValueError) as error:
            raise ObjectError(errno.EINVAL, _first_line(error), self.where) from None

    def head(self, name: str) -> Found | None:
        """The object, or None when there is none.

        Raises:
            ObjectError: no answer.
        """
        try:
            return _found(_call(name, lambda: obstore.head(self._reader, name)))
        except ObjectError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def get(self, name: str) -> Download:
        """Begin to fetch an object.

        Raises:
            ObjectError: ENOENT, or no answer.
        """
        answer = _call(name, lambda: obstore.get(self._reader, name))
        return Download(_found(answer.meta), answer)

    def fetch(self, name: str) -> tuple[bytes, str] | None:
        """A small object's content and etag, or None when there is none.

        Raises:
            ObjectError: no answer.
        """
        try:
            answer = self.get(name)
            return bytes(answer.body()), answer.found.etag
        except ObjectError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def put(
        self,
        name: str,
        parts: list[memoryview] | bytes,
        *,
        absent: bool = False,
        etag: str = "",
    ) -> str:
        """Write an object in one request; it appears whole or not at all. Returns its etag.

        Args:
            absent: only where there is none (else EEXIST).
            etag: only over this version (else ESTALE).

        Raises:
            ObjectError: see there. With ``uncertain`` a failed condition may be our own doing.
        """
        mode: Any = "create" if absent else {"e_tag": etag} if etag else "overwrite"
        uncertain = False
        pause_s = _FIRST_PAUSE_S
        for left in range(self._retries, -1, -1):
            try:
                answer = _call(
                    name,
                    lambda: obstore.put(self._writer, name, parts, mode=mode, use_multipart=False),
                )
            except ObjectError as error:
                error.uncertain = uncertain
                if error.errno != errno.EIO:
                    raise
                uncertain = error.uncertain = True
                if not left:
                    raise
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                return answer["e_tag"] or ""
        raise AssertionError("unreachable")

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is a success.

        Raises:
            ObjectError: it could not be removed.
        """
        try:
            _call(name, lambda: obstore.delete(self._reader, name))
        except ObjectError as error:
            if error.errno != errno.ENOENT:
                raise

    def list(self, folder: str, after: str = "") -> Iterator[Found]:
        """Every object below a folder, page by page, in the order of their names.

        Args:
            folder: whole parts of a name, without a slash at its end; empty for everything.
            after: start behind this name.

        Raises:
            ObjectError: a page could not be had.
        """
        stream = obstore.list(
            self._reader, folder or None, offset=after or None, chunk_size=_LIST_PAGE
        )
        while True:
            page = _call(folder, lambda: next(stream, None))
            if page is None:
                return
            for meta in page:
                yield _found(meta)

    def wipe(self) -> None:
        """Remove everything below the prefix, which must not be empty.

        Raises:
            ObjectError: something could not be listed or removed.
        """
        if not self._prefix:
            raise ObjectError(errno.EINVAL, "the whole bucket is not removed", self.where)
        for found in self.list(""):
            self.delete(found.name)


def _call(name: str, request: Callable[[], T]) -> T:
    try:
        return request()
    except (exceptions.BaseError, OSError) as error:
        code = next((code for kind, code in _FAULTS if isinstance(error, kind)), errno.EIO)
        text = _first_line(error)
        if code in (errno.EIO, errno.EACCES) and any(word in str(error) for word in _NO_ROOM):
            code = errno.ENOSPC
        raise ObjectError(code, text, name) from None


def _first_line(error: Exception) -> str:
    """The library's texts go on for pages."""
    return str(error).partition("\n")[0][:300]


def _found(meta: Any) -> Found:
    return Found(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())
