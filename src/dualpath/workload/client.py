"""Streamed requests to an OpenAI-compatible endpoint. Token times are taken as bytes arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from dualpath.workload.sse import EventError, EventParser
from dualpath.workload.stream import (
    Answer,
    AnswerStream,
    Failure,
    RequestFailed,
    Stopwatch,
    error_text,
)

_RETRY_FIRST_S: Final = 0.25
_RETRY_MOST_S: Final = 4.0
_CONNECT_S: Final = 10.0
_ERROR_BODY_BYTES: Final = 2000
_OWN_HEADERS: Final = "x-dualpath-"


class Endpoint:
    """An OpenAI-compatible server. One owner; requests may run at the same time."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """``url`` with or without a trailing ``/v1``."""
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        # Servers close idle connections after five seconds or more; dropping ours first means that
        # a request is never sent into a connection that is being closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=1 << 20, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a GET.

        Raises:
            RequestFailed: no answer within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s), self._open.get(self.url + path) as response:
                return response.status, await response.read()
        except TimeoutError:
            text = f"{self.url}{path}: no answer within {timeout_s:g} s"
            raise RequestFailed(Failure.DEADLINE, text) from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise RequestFailed(Failure.CONNECTION, f"{self.url}{path}: {error}") from None

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a POST whose answer is not streamed.

        Raises:
            RequestFailed: no answer within ``timeout_s``.
        """
        data = msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open.post(self.url + path, data=data) as response,
            ):
                return response.status, await response.read()
        except TimeoutError:
            text = f"{self.url}{path}: no answer within {timeout_s:g} s"
            raise RequestFailed(Failure.DEADLINE, text) from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise RequestFailed(Failure.CONNECTION, f"{self.url}{path}: {error}") from None

    async def ask(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, retries: int
    ) -> Answer:
        """Send one streaming request and wait for all of its answer.

        Args:
            path: endpoint, e.g. ``/v1/completions``.
            body: the request; ``stream`` must be true in it.
            timeout_s: for everything, retries included.
            retries: more tries after a 5xx or a broken connection, while no token has come.

        Raises:
            RequestFailed: there is no usable answer.
        """
        encoded = msgspec.json.encode(body)
        start_s = time.perf_counter()
        attempt = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    attempt += 1
                    try:
                        return await self._attempt(path, encoded, start_s, attempt)
                    except RequestFailed as error:
                        if not error.retry or attempt > retries:
                            error.attempts = attempt
                            raise
                    await asyncio.sleep(min(_RETRY_MOST_S, _RETRY_FIRST_S * 2 ** (attempt - 1)))
        except TimeoutError:
            text = f"not over after {timeout_s:g} s (attempt {attempt})"
            expired = RequestFailed(Failure.DEADLINE, text)
            expired.attempts = attempt
            raise expired from None

    async def _attempt(self, path: str, body: bytes, start_s: float, attempt: int) -> Answer:
        stream = AnswerStream(Stopwatch(start_s))
        parser = EventParser()
        try:
            async with self._open.post(self.url + path, data=body) as response:
                if response.status != 200:
                    raise await _status_error(response)
                headers = {
                    name.lower(): value
                    for name, value in response.headers.items()
                    if name.lower().startswith(_OWN_HEADERS)
                }
                async for piece in response.content.iter_any():
                    now_s = time.perf_counter()
                    for payload in parser.feed(piece):
                        stream.take(payload, now_s)
        except (aiohttp.ClientError, OSError) as error:
            retry = stream.watch.tokens == 0
            text = f"{type(error).__name__}: {error}"
            raise RequestFailed(Failure.CONNECTION, text, retry=retry) from None
        except EventError as error:
            raise RequestFailed(Failure.STREAM, str(error)) from None
        if parser.pending:
            raise RequestFailed(Failure.STREAM, "the stream ended inside an event")
        return stream.answer(time.perf_counter(), attempt, headers)

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the endpoint as an async context manager")
        return self._session


async def _status_error(response: aiohttp.ClientResponse) -> RequestFailed:
    """The failure that an HTTP status other than 200 means."""
    body = await response.content.read(_ERROR_BODY_BYTES)
    try:
        text = error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):  # no JSON: an error page, shown as it is
        text = body.decode(errors="replace")
    text = f"HTTP {response.status}: {text}"
    if response.status >= 500:
        return RequestFailed(Failure.SERVER, text, retry=True)
    return RequestFailed(Failure.REFUSED, text)
