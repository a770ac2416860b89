"""Text to token ids, once per request, by an engine's own tokenizer and chat template."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dualpath.serve.body import Call
from dualpath.serve.errors import EngineAnswer, PassedThrough, bad_request
from dualpath.serve.upstream import Upstream

_CHAT_KEYS: Final = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
_HIDE_TOOLS: Final = "--exclude-tools-when-tool-choice-none"


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]
    max_model_len: int


_DECODER: Final = msgspec.json.Decoder(_Tokens)


def given_ids(call: Call) -> list[int] | None:
    """The prompt where the client sent token ids; None where an engine must make them."""
    prompt = call.body.get("prompt")
    return prompt if not call.is_chat and isinstance(prompt, list) else None


async def prompt_ids(
    call: Call, upstream: Upstream, url: str, model: str, rid: str, engine_args: tuple[str, ...]
) -> list[int]:
    """The prompt's text as the engine would see it.

    Args:
        url: of a usable engine.
        engine_args: vLLM arguments of the engines, some of which change the chat template's input.

    Raises:
        PassedThrough: the engine refused the request.
        EngineAnswer: the engine failed; another one may not.
        ApiError: 400, the prompt is empty or an argument of the template is malformed.
    """
    body = _chat_request(call.body, engine_args) if call.is_chat else _text_request(call.body)
    status, answer = await upstream.post(f"{url}/tokenize", {"model": model, **body}, rid)
    if status != 200:
        raise PassedThrough(status, answer)
    try:
        tokens = _DECODER.decode(answer).tokens
    except msgspec.MsgspecError as error:
        raise EngineAnswer(f"{url}/tokenize: not the expected answer: {error}") from error
    if not tokens:
        raise bad_request("the prompt is empty", "messages" if call.is_chat else "prompt")
    return tokens


def _text_request(body: dict[str, Any]) -> dict[str, Any]:
    request = {"prompt": body["prompt"]}
    if body.get("add_special_tokens") is not None:
        request["add_special_tokens"] = body["add_special_tokens"]
    return request


def _chat_request(body: dict[str, Any], engine_args: tuple[str, ...]) -> dict[str, Any]:
    """The tokenizer endpoint has no fields for what a chat request passes to the template
    besides messages and tools; the template takes them as arguments all the same."""
    request = {key: body[key] for key in _CHAT_KEYS if body.get(key) is not None}
    if _HIDE_TOOLS in engine_args and body.get("tool_choice") == "none":
        request.pop("tools", None)
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
    arguments = dict(given or {})
    for key in ("documents", "reasoning_effort"):
        if body.get(key) is not None:
            arguments[key] = body[key]
    if body.get("reasoning_effort") is not None:
        arguments.setdefault("enable_thinking", body["reasoning_effort"] != "none")
    if arguments:
        request["chat_template_kwargs"] = arguments
    return request
