"""A client's request body: read strictly, so that what is wrong is a 4xx before anything starts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dualpath.serve.errors import ApiError, bad_request, malformed

MAX_BODY_BYTES: Final = 64 << 20
MAX_TOKEN_ID: Final = (1 << 32) - 1
MAX_CHOICES: Final = 128
_OURS: Final = ("kv_transfer_params", "ec_transfer_params")
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
# A part with any other key (``image_url`` beside ``text``, say) carries more than text.
_PART_KEYS: Final = frozenset({"type", "cache_control", "annotations", "signature"}) | _TEXT_PARTS
# Plain attention over the whole prompt is needed (its log-probabilities), or another prompt than
# ours would be run (truncation, beams): such a request is answered by one engine alone.
_WHOLE_PROMPT: Final = ("prompt_logprobs", "truncate_prompt_tokens", "use_beam_search")


class Endpoint(enum.Enum):
    """What is asked; the value is the path, here and at the engines."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request.

    Attributes:
        body: the client's body, unchanged.
        stream: answer as server-sent events.
        include_usage: end the stream with a usage chunk.
        choices: answers asked for (``n``).
        max_tokens: the limit the client gave; None when it gave none.
        alone: must be answered by one engine without loaded KV.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    stream: bool
    include_usage: bool
    choices: int
    max_tokens: int | None
    alone: bool

    @property
    def is_chat(self) -> bool:
        """Chat rather than completion."""
        return self.endpoint is Endpoint.CHAT


def parse_call(endpoint: Endpoint, raw: bytes, model: str) -> Call:
    """Check a body.

    Args:
        model: the name served.

    Raises:
        ApiError: 400 for anything malformed, 404 for another model.
    """
    body = _object(raw)
    asked = body.get("model")
    if asked is not None and not isinstance(asked, str):
        raise malformed("model must be a string", "model")
    if asked and asked != model:
        raise ApiError(
            404, f"The model `{asked}` does not exist. Valid aliases: {model}.", param="model"
        )
    for name in _OURS:
        if body.get(name) is not None:
            raise bad_request(f"{name} is set by the server, not by clients", name)
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise malformed("stream_options must be an object", "stream_options")
        if not stream:
            raise bad_request(
                "stream_options can only be used with stream = true", "stream_options"
            )
    if endpoint is Endpoint.CHAT:
        _check_messages(body.get("messages"))
        limit = _integer(body, "max_completion_tokens", 0)
        limit = _integer(body, "max_tokens", 0) if limit is None else limit
    else:
        _check_prompt(body)
        limit = _integer(body, "max_tokens", 0)
        if "max_tokens" not in body:
            limit = 16  # the API's default
    choices = _integer(body, "n", 1)
    if choices is not None and choices > MAX_CHOICES:
        raise bad_request(f"n must be at most {MAX_CHOICES}", "n")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise bad_request("cache_salt must be a non-empty string", "cache_salt")
    return Call(
        endpoint=endpoint,
        body=body,
        stream=stream,
        include_usage=isinstance(options, dict) and _flag(options, "include_usage"),
        choices=choices or 1,
        max_tokens=limit,
        alone=_alone(endpoint, body, limit),
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise malformed("the body must be a JSON object")
    return body


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise malformed(f"{name} must be true or false", name)
    return value


def _integer(body: dict[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise malformed(f"{name} must be an integer", name)
    if value < least:
        raise bad_request(f"{name} must be at least {least}", name)
    return value


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list):
        raise malformed("messages must be a list", "messages")
    if not messages:
        raise bad_request("messages must not be empty", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise malformed("each message must be an object with a role", "messages")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise malformed("content must be a string or a list of parts", "messages")
        for part in content:
            # A picture's KV is not determined by its token ids, which is all a block's key covers.
            if not _is_text(part):
                raise bad_request("only text content is served here", "messages")


def _is_text(part: object) -> bool:
    if isinstance(part, str):
        return True
    if not isinstance(part, dict) or not part.keys() <= _PART_KEYS:
        return False
    kind = part.get("type", "text")
    return isinstance(kind, str) and kind in _TEXT_PARTS


def _check_prompt(body: dict[str, Any]) -> None:
    if body.get("prompt_embeds") is not None:
        raise bad_request("prompt_embeds is not served here", "prompt_embeds")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = body["prompt"] = prompt[0]
    if isinstance(prompt, str):
        return
    if prompt is not None and not isinstance(prompt, list):
        raise malformed("prompt must be a string or a list of token ids", "prompt")
    if not prompt:
        raise bad_request("prompt must be a string or a non-empty list of token ids", "prompt")
    kinds = set(map(type, prompt))  # prompts are long, and this runs in C
    if kinds & {str, list}:
        raise bad_request(
            "several prompts in one request are not served here: send one request each", "prompt"
        )
    if kinds != {int} or min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
        raise bad_request("token ids must be integers from 0 to 4294967295", "prompt")


def _given(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    return value is not None and value is not False  # 0 is a value, and equals False


def _alone(endpoint: Endpoint, body: dict[str, Any], limit: int | None) -> bool:
    if any(_given(body, name) for name in _WHOLE_PROMPT):
        return True
    echo = _given(body, "echo")
    if endpoint is Endpoint.COMPLETION:
        return limit == 0 or (echo and body.get("logprobs") is not None)
    return limit == 0
