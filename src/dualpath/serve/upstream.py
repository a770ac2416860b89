"""HTTP to the engines: one keep-alive pool for all requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from dualpath.serve.errors import EngineAnswer

# vLLM's server drops a connection that was idle for 5 s; ours must go first, or a request meets
# a connection that is being closed.
_KEEPALIVE_S: Final = 3.0
_JSON: Final = {"content-type": "application/json"}
_DONE: Final = b"[DONE]"


class Upstream:
    """Client of all engines. Belongs to the event loop; close it at the end."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            # Engines set none, and looking for some costs every request.
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept-encoding"),
            # Loopback and cluster addresses must not go through a proxy.
            trust_env=False,
        )

    async def close(self) -> None:
        """Drop every connection."""
        await self._session.close()

    async def healthy(self, url: str, timeout_s: float) -> bool:
        """Whether the engine at ``url`` answers its health check within the time given."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(f"{url}/health") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False

    async def post(self, url: str, body: dict[str, Any], rid: str) -> tuple[int, bytes]:
        """Send a JSON body; the whole answer as ``(status, body)``. The caller sets the deadline;
        cancelling closes the connection, which makes vLLM abort the request.

        Raises:
            EngineAnswer: the connection failed, or a 5xx.
        """
        async with self.open(url, body, rid) as response:
            return response.status, await response.read()

    @asynccontextmanager
    async def open(
        self, url: str, body: dict[str, Any], rid: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The same with the body of the answer still to come.

        Raises:
            EngineAnswer: the connection failed (here or while reading), or a 5xx.
        """
        headers = {**_JSON, "x-request-id": rid}
        try:
            async with self._session.post(
                url, data=msgspec.json.encode(body), headers=headers
            ) as response:
                if response.status >= 500:
                    text = (await response.read())[:500].decode(errors="replace")
                    raise EngineAnswer(f"{url} answered HTTP {response.status}: {text}")
                try:
                    yield response
                except BaseException:  # whatever ends the use, a cancelled task too
                    response.close()  # not back to the pool: the rest must not be waited for
                    raise
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise EngineAnswer(f"{url}: {type(error).__name__}: {error}") from error


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[list[dict[str, Any]]]:
    """The JSON objects of a server-sent event stream, up to ``[DONE]``; together those that came
    together.

    Raises:
        EngineAnswer: the stream ended before that, or holds something else.
    """
    buffer = b""
    async for piece in response.content.iter_any():
        buffer += piece
        *complete, buffer = buffer.split(b"\n\n")
        found = [data for block in complete if (data := _data(block))]
        done = _DONE in found
        if done:
            del found[found.index(_DONE) :]
        if found:
            yield [_decode(data) for data in found]
        if done:
            return
    raise EngineAnswer("the engine's stream ended early")


def _data(block: bytes) -> bytes:
    lines = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise EngineAnswer(f"the engine streamed no JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineAnswer("the engine streamed JSON that is no object")
    return value
