"""What vLLM's HTTP server answers, for tokens that a stand-in made up."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from fake_model import text_of


class Render:
    """vLLM's answers."""

    def __init__(
        self, request: web.Request, body: dict[str, Any], ids: list[int], chat: bool
    ) -> None:
        self._body = body
        self._ids = ids
        self._chat = chat
        prefix = "chatcmpl" if chat else "cmpl"
        self._base = {
            "id": f"{prefix}-{request.headers['x-request-id']}",
            "created": 2000,
            "model": body.get("model") or "fake",
        }

    @property
    def _wants_ids(self) -> bool:
        return bool(self._body.get("return_token_ids"))

    def _usage(self, count: int) -> dict[str, Any]:
        prompt = len(self._ids)
        return {
            "prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count,
        }  # fmt: skip

    def _chunk(self, choices: list[dict[str, Any]], count: int) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._base, "object": kind, "choices": choices}
        options = self._body.get("stream_options") or {}
        if choices and options.get("continuous_usage_stats"):
            chunk["usage"] = self._usage(count)
        return chunk

    def opening(self) -> list[dict[str, Any]]:
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        chunk = self._chunk(
            [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], 0
        )
        if self._wants_ids:
            chunk["prompt_token_ids"] = self._ids
        return [chunk]

    def token(self, token: int, count: int, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0, "logprobs": None, "finish_reason": finish,
            "token_ids": [token] if self._wants_ids else None,
        }  # fmt: skip
        if self._chat:
            choice["delta"] = {"content": text_of([token])}
            if finish:
                choice["stop_reason"] = None
        else:
            choice |= {"text": text_of([token]), "stop_reason": None, "prompt_token_ids": None}
            if count == 1 and self._wants_ids:
                choice["prompt_token_ids"] = self._ids
        return self._chunk([choice], count)

    def closing(self, count: int) -> dict[str, Any]:
        return {**self._chunk([], count), "usage": self._usage(count)}

    def whole(self, answer: list[int], finish: str) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None,
            "token_ids": answer if self._wants_ids else None,
        }  # fmt: skip
        body = {**self._base, "choices": [choice], "usage": self._usage(len(answer))}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text_of(answer)}
            body["object"] = "chat.completion"
            body["prompt_token_ids"] = self._ids if self._wants_ids else None
        else:
            choice["text"] = text_of(answer)
            choice["prompt_token_ids"] = self._ids if self._wants_ids else None
            body["object"] = "text_completion"
        count = self._body.get("n") or 1
        body["choices"] = [{**choice, "index": index} for index in range(count)]
        return body


async def send_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


_NUMBER = (int, float)
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
         "repetition_penalty"),
        _NUMBER,
    ),
    **dict.fromkeys(("top_k", "seed", "min_tokens", "max_tokens", "n", "prompt_logprobs",
                     "max_completion_tokens"), (int,)),
    **dict.fromkeys(("ignore_eos", "return_token_ids", "stream", "echo"), (bool,)),
    **dict.fromkeys(("logit_bias", "response_format", "structured_outputs", "stream_options",
                     "chat_template_kwargs"), (dict,)),
    **dict.fromkeys(("stop_token_ids", "tools", "messages"), (list,)),
    "stop": (str, list),
    "suffix": (str,),
    "user": (str,),
}  # fmt: skip


@web.middleware
async def refuse_malformed(request: web.Request, handler: Any) -> web.StreamResponse:
    """As vLLM does: what is of the wrong type is a 400, whatever part of the server noticed."""
    if request.can_read_body:
        body = await request.json()
        for name, kinds in _FIELDS.items():
            value = body.get(name)
            wrong = isinstance(value, bool) and bool not in kinds
            if value is not None and (wrong or not isinstance(value, kinds)):
                return error_answer(400)
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return error_answer(400)


def error_answer(status: int) -> web.Response:
    body = {"error": {"message": "told to", "type": "T", "param": "p", "code": status}}
    return web.json_response(body, status=status)
