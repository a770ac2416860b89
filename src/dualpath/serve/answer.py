"""The client's answer, put together from token 1 and the DE's answer.

Without a token 1 from the PE the DE's answer passes through; only ``usage`` is corrected: the
cached tokens are those that came from storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualpath.serve.body import Call
from dualpath.serve.first_token import FirstToken

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer must say whatever the DE says.

    Attributes:
        answer_id: id of the response.
        model: the name served.
        prompt_ids: the prompt.
        cached_tokens: prompt tokens whose KV came from storage.
        first: token 1 when the PE sampled it.
        own_usage: the engine's own figures stand (it ran a prompt of its own).
    """

    call: Call
    answer_id: str
    model: str
    prompt_ids: list[int]
    cached_tokens: int
    first: FirstToken | None
    own_usage: bool = False

    @property
    def wants_ids(self) -> bool:
        """Whether the client asked for token ids."""
        return bool(self.call.body.get("return_token_ids"))

    @property
    def _continuous(self) -> bool:
        options = self.call.body.get("stream_options") or {}
        return bool(options.get("include_usage") and options.get("continuous_usage_stats"))

    # ---- usage -------------------------------------------------------------------------------

    def usage(self, completion_tokens: int, *, final: bool = True) -> Json:
        """A usage object."""
        prompt = len(self.prompt_ids)
        usage: Json = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        if final:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def correct_usage(self, usage: Json, *, final: bool) -> None:
        """Correct the DE's usage in place."""
        if self.own_usage:
            return
        extra = 0 if self.first is None else 1
        completion = int(usage.get("completion_tokens") or 0) + extra
        details = usage.get("prompt_tokens_details")
        usage.update(self.usage(completion, final=final))
        if final and isinstance(details, dict):
            usage["prompt_tokens_details"] = {**details, "cached_tokens": self.cached_tokens}

    # ---- streaming ---------------------------------------------------------------------------

    def opening_events(self) -> list[Json]:
        """The chunks up to and with token 1."""
        first = self.first
        assert first is not None
        events: list[Json] = []
        if self.call.is_chat:
            role = self._chunk([self._choice({"role": "assistant", "content": ""})], 0)
            role["prompt_token_ids"] = self.prompt_ids if self.wants_ids else None
            role["prompt_text"] = None
            events.append(role)
        if first.text:
            events.append(self._chunk([self._token_choice(first.text, [first.token_id])], 1))
        return events

    def ending_events(self) -> list[Json]:
        """The chunks that end an answer of which token 1 is the last."""
        first = self.first
        assert first is not None
        ids = [] if first.text else [first.token_id]
        choice = self._token_choice("", ids)
        choice["finish_reason"] = first.finish_reason
        choice["stop_reason"] = first.stop_reason
        last = self._chunk([choice], 1)
        if first.fingerprint and not self.call.include_usage:
            last["system_fingerprint"] = first.fingerprint
        events = [last]
        if self.call.include_usage:
            closing = self._chunk([], 1)
            closing["usage"] = self.usage(1)
            if first.fingerprint:
                closing["system_fingerprint"] = first.fingerprint
            events.append(closing)
        return events

    def correct_event(self, event: Json) -> Json | None:
        """A chunk of the DE as the client gets it; None drops it (a second role chunk)."""
        event["id"] = self.answer_id
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.correct_usage(usage, final=not event.get("choices"))
        first = self.first
        if first is None:
            return event
        event["created"] = first.created
        if "prompt_token_ids" in event:
            del event["prompt_token_ids"]  # went out with the first chunk
        for choice in event.get("choices") or ():
            if self.call.is_chat and (choice.get("delta") or {}).get("role"):
                return None
            if choice.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = None
        return event

    def _chunk(self, choices: list[Json], completion_tokens: int) -> Json:
        assert self.first is not None
        chunk: Json = {
            "id": self.answer_id,
            "object": "chat.completion.chunk" if self.call.is_chat else "text_completion",
            "created": self.first.created,
            "model": self.model,
            "choices": choices,
        }
        if choices and self._continuous:
            chunk["usage"] = self.usage(completion_tokens, final=False)
        return chunk

    def _choice(self, delta: Json) -> Json:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    def _token_choice(self, text: str, token_ids: list[int]) -> Json:
        if self.call.is_chat:
            choice = self._choice({"content": text})
            choice["token_ids"] = token_ids if self.wants_ids else None
            return choice
        assert self.first is not None
        opening = bool(text) or token_ids == [self.first.token_id]
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": self.prompt_ids if self.wants_ids and opening else None,
            "token_ids": token_ids if self.wants_ids else None,
        }

    # ---- whole -------------------------------------------------------------------------------

    def correct_whole(self, body: Json) -> Json:
        """The DE's whole answer, with token 1 in front; changed in place."""
        body["id"] = self.answer_id
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.correct_usage(usage, final=True)
        first = self.first
        if first is None:
            return body
        if body.get("prompt_token_ids") is not None:
            body["prompt_token_ids"] = self.prompt_ids
        for choice in body.get("choices") or ():
            if choice.get("token_ids") is not None:
                choice["token_ids"] = [first.token_id, *choice["token_ids"]]
            if choice.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = self.prompt_ids
            if self.call.is_chat:
                message = choice["message"]
                message["content"] = first.text + (message.get("content") or "")
            else:
                choice["text"] = first.text + choice["text"]
        return body

    def whole_from_first(self) -> Json:
        """A whole answer of which token 1 is the last."""
        first = self.first
        assert first is not None
        ids = [first.token_id] if self.wants_ids else None
        prompt_ids = self.prompt_ids if self.wants_ids else None
        choice: Json = {
            "index": 0,
            "logprobs": None,
            "finish_reason": first.finish_reason,
            "stop_reason": first.stop_reason,
            "token_ids": ids,
            "routed_experts": None,
        }
        body: Json = {
            "id": self.answer_id,
            "object": "chat.completion" if self.call.is_chat else "text_completion",
            "created": first.created,
            "model": self.model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": first.fingerprint,
            "usage": {**self.usage(1), "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        if self.call.is_chat:
            choice["message"] = {
                "role": "assistant",
                "content": first.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            body |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
        else:
            choice |= {
                "text": first.text,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt_ids,
            }
        return body
