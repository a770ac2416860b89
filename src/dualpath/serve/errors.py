"""How a request can fail, and what its client is told.

Errors have OpenAI's form, ``{"error": {"message", "type", "param", "code"}}``, with vLLM's type
names, so that a client sees no difference between the front and one engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec


@dataclass(slots=True)
class ApiError(Exception):
    """The request ends with this answer.

    Attributes:
        status: HTTP status.
        message: one line that says what to change, or what went wrong.
        kind: error type in the body; from the status when empty.
        param: field of the request the error is about.
        headers: further response headers.
    """

    status: int
    message: str
    kind: str = ""
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message)

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(self.status, self.message, self.kind, self.param)


def error_body(status: int, message: str, kind: str = "", param: str | None = None) -> bytes:
    """OpenAI's error form."""
    detail = {
        "message": message,
        "type": kind or _kind(status),
        "param": param,
        "code": status,
    }
    return msgspec.json.encode({"error": detail})


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param)


def malformed(message: str, param: str | None = None) -> ApiError:
    """A 400 for a body that is not of the right form, which vLLM gives another type than one
    whose values cannot be served."""
    return ApiError(400, message, kind="Bad Request", param=param)


@dataclass(slots=True)
class PassedThrough(Exception):
    """An engine's own answer, given to the client unchanged."""

    status: int
    body: bytes

    def __post_init__(self) -> None:
        Exception.__init__(self, f"the engine answered HTTP {self.status}")


class AttemptFailed(Exception):
    """This try failed for a reason that another one may not meet."""


class EngineLost(AttemptFailed):
    """An engine's process ended, left, or went silent while the request needed it."""


class EngineAnswer(AttemptFailed):
    """An engine answered with a server error, or broke its connection off."""


def _kind(status: int) -> str:
    known = {401: "AuthenticationError", 403: "PermissionError", 404: "NotFoundError"}
    if status in known:
        return known[status]
    if status < 500:
        return "BadRequestError"
    return "".join(HTTPStatus(status).phrase.title().split())
