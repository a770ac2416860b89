"""The router that a peer's clients talk to: prefill engine first, then decode engine, in turn.

``python -m dualpath.lab.peers.router``; run in the front's host. One router for all peers, so that
they differ in nothing but their KV: ``vllm-router`` 0.1.17 does not hand on what
``bidirectional_kv_xfer`` needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Final

import aiohttp
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dualpath.lab.peers.kept import Keeping
from dualpath.lab.peers.turns import Turn, TurnFailed

REQUEST_S: Final = 600.0
_HEALTH_S: Final = 5.0


class Router:
    """All requests of all clients. One event loop."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], keeping: Keeping | None
    ) -> None:
        """
        Args:
            prefill, decode: the engines' URLs.
            keeping: what decode engines keep between turns; None where they keep nothing.
        """
        self._engines = (*prefill, *decode)
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._keeping = keeping
        self._salts = itertools.count()
        self._salt = f"{next(self._salts)}"
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> Starlette:
        """The HTTP interface."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/forget", self._forget, methods=["POST"]),
            ],
            lifespan=self._life,
        )

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        headers = {"Content-Type": "application/json"}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, connector=connector
        ) as session:
            self._session = session
            yield

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the router is not running")
        return self._session

    async def _health(self, _: Request) -> Response:
        """200 once all engines are well."""
        well = await asyncio.gather(*(self._well(url) for url in self._engines))
        return Response(status_code=200 if all(well) else 503)

    async def _well(self, url: str) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S), self._open.get(f"{url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _models(self, _: Request) -> Response:
        try:
            async with self._open.get(f"{self._engines[0]}/v1/models") as response:
                body = await response.read()
                return Response(body, response.status, media_type="application/json")
        except (aiohttp.ClientError, TimeoutError) as error:
            return _error(502, str(error) or type(error).__name__)

    async def _forget(self, _: Request) -> Response:
        """From now on nothing is hit that was computed before."""
        self._salt = f"{next(self._salts)}"
        if self._keeping is not None:
            self._keeping.clear()
        return Response()

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not all(isinstance(one, int) for one in prompt):
            return _error(400, "prompt: must be a list of token ids")
        if not body.get("stream"):
            return _error(400, "stream: must be true")
        turn = Turn(self._open, body, self._salt, self._keeping)
        try:
            await turn.prefill(next(self._prefill), time.monotonic())
        except TurnFailed as error:
            return _error(error.status, str(error))
        events = turn.answer(next(self._decode), time.monotonic)
        return StreamingResponse(events, media_type="text/event-stream")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": {"message": text}}, status)


def main(
    host: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    prefill: Annotated[list[str], typer.Option()],
    decode: Annotated[list[str], typer.Option()],
    keep_s: Annotated[
        float | None, typer.Option(help="Decode engines keep KV this long for the next turn.")
    ] = None,
) -> None:
    """Route requests to a peer's engines."""
    keeping = None if keep_s is None else Keeping(keep_s)
    app = Router(prefill, decode, keeping).app()
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    typer.run(main)
