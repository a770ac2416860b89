"""The HTTP API: routes, and watching for clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dualpath.config import ConfigError, Mode
from dualpath.serve.auth import require_admin, tenant_of
from dualpath.serve.body import MAX_BODY_BYTES, Endpoint, parse_call
from dualpath.serve.dispatch import RequestsUnderWay
from dualpath.serve.errors import ApiError, bad_request, error_body
from dualpath.serve.front import Front
from dualpath.serve.metrics import CONTENT_TYPE
from dualpath.serve.openapi import document
from dualpath.serve.reply import Reply
from dualpath.storage import StoreError

_JSON: Final = "application/json"


def make_app(front: Front) -> ASGIApp:
    """The ASGI application of ``front``."""
    routes = Routes(front)
    generating = {endpoint.value: Answering(front, endpoint) for endpoint in Endpoint}
    others = Starlette(
        routes=[
            *(Route(path, app, methods=["POST"]) for path, app in generating.items()),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
            Route("/debug/state", routes.state),
            Route("/debug/requests", routes.requests),
            Route("/debug/attention", routes.attention),
            Route("/admin/weights/advance", routes.advance_weights, methods=["POST"]),
            Route("/admin/mode", routes.set_mode, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            404: _not_found,
            405: _wrong_method,
        },
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Straight there: an endpoint that generates answers its own errors, and what wraps the
        # others costs every streamed token.
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in generating:
            await generating[scope["path"]](scope, receive, send)
        else:
            await others(scope, receive, send)

    return app


class Answering:
    """An endpoint that generates: one task does the work, another watches the client."""

    def __init__(self, front: Front, endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        reply = Reply(send)
        request = Request(scope, receive)
        try:
            tenant = tenant_of(request.headers, self._front.config.security)
            if self._front.draining:
                raise ApiError(503, "the server is stopping", headers={"retry-after": "5"})
            raw = await read_body(request, MAX_BODY_BYTES)
            call = parse_call(self._endpoint, raw, self._front.config.model.name)
        except ClientDisconnect:
            return
        except ApiError as error:
            # The rest of a body that was not read would be taken for the next request.
            await reply.fail_with(
                error.status, error.body(), {**error.headers, "connection": "close"}
            )
            return
        work = asyncio.create_task(self._front.answer(call, tenant, reply))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Either may be under way: the client went, or the server cancels this very task.
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def read_body(request: Request, most: int) -> bytes:
    """The body, read no further than the limit.

    Raises:
        ApiError: 413.
        ClientDisconnect: the client went away.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise ApiError(413, f"the body is larger than {most} bytes")
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > most:
            raise ApiError(413, f"the body is larger than {most} bytes")
    return bytes(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Routes:
    """Everything that answers at once."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        tenant_of(request.headers, self._front.config.security)
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``."""
        tenant_of(request.headers, self._front.config.security)
        name = request.path_params["name"]
        if name != self._front.config.model.name:
            raise ApiError(404, f"The model `{name}` does not exist.", param="model")
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        model = self._front.config.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dualpath",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """``GET /health``: the front's own parts are alive."""
        return Response(status_code=503 if self._front.failed.done() else 200)

    async def ready(self, request: Request) -> Response:
        """``GET /ready``: a PE and a DE can be used."""
        return Response(status_code=200 if self._front.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics``."""
        return Response(self._front.metrics.render(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        """``GET /openapi.json``."""
        return _json(document(self._front.config.model.name))

    async def state(self, request: Request) -> Response:
        """``GET /debug/state``."""
        self._admin(request)
        return _json(self._front.state())

    async def requests(self, request: Request) -> Response:
        """``GET /debug/requests``."""
        self._admin(request)
        return _json({"requests": self._front.records.recent()})

    async def attention(self, request: Request) -> Response:
        """``GET /debug/attention``: the latest attention measurements of every PE."""
        self._admin(request)
        return _json({"engines": self._front.attention()})

    async def advance_weights(self, request: Request) -> Response:
        """``POST /admin/weights/advance``, body ``{"in_place": bool}`` (true when left out)."""
        self._admin(request)
        body = await _body(request)
        in_place = body.get("in_place", True)
        if not isinstance(in_place, bool):
            raise bad_request("in_place must be true or false", "in_place")
        try:
            number = await self._front.epoch.advance(
                in_place=in_place, reason="asked by an operator"
            )
        except (StoreError, TimeoutError) as error:
            raise ApiError(503, f"the weight epoch could not be advanced: {error}") from None
        return _json({"weight_epoch": number})

    async def set_mode(self, request: Request) -> Response:
        """``POST /admin/mode``, body ``{"mode": name, "policy": name}``; without a policy the
        mode's own."""
        self._admin(request)
        body = await _body(request)
        names = ", ".join(mode.value for mode in Mode)
        try:
            mode = Mode(body.get("mode"))
        except ValueError:
            raise bad_request(f"mode must be one of {names}", "mode") from None
        policy = body.get("policy", "")
        if not isinstance(policy, str):
            raise bad_request("policy must be a string", "policy")
        try:
            self._front.set_mode(mode, policy)
        except RequestsUnderWay as error:
            raise ApiError(409, str(error)) from None
        except ConfigError as error:
            raise bad_request(str(error), "mode") from None
        except ValueError as error:
            raise bad_request(str(error), "policy") from None
        return _json({"mode": mode.value})

    def _admin(self, request: Request) -> None:
        config = self._front.config
        require_admin(request.headers, config.front.host, config.security)


async def _body(request: Request) -> dict[str, object]:
    raw = await read_body(request, 1 << 16)
    if not raw:
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object: {error}") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=_JSON)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, headers=error.headers, media_type=_JSON)


async def _not_found(request: Request, error: Exception) -> Response:
    return Response(error_body(404, f"no such path: {request.url.path}"), 404, media_type=_JSON)


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None)
    return Response(
        error_body(405, f"{request.method} is not allowed here"),
        405,
        headers=headers,
        media_type=_JSON,
    )
