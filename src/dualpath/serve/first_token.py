"""The first token of an answer: sampled by the PE, or by the DE.

The PE computes the prompt's last position anyway, so it samples token 1 and the client gets it
before any KV has moved; the DE continues from prompt + token 1. That is only done where one token
sampled apart from the rest gives the same answer as one engine would: plain greedy or random
sampling of one sequence. State that spans tokens (seeds, penalties, stop strings, grammars,
minimum lengths, log-probabilities) stays on one engine, the DE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dualpath.config import ClusterConfig
from dualpath.serve.body import Call

_REPLACEMENT: Final = "\ufffd"
# Passed to the PE as they stand; it refuses bad values before a byte has reached the client.
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
_FREE: Final = frozenset(
    {"model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens",
     "cache_salt", "chat_template_kwargs", "reasoning_effort", "documents"}
) | frozenset(_SAMPLING)  # fmt: skip
_FLAGS: Final = frozenset({"return_token_ids"})
# Keys whose neutral value changes nothing; any other value keeps token 1 on the DE.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "seed": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": (),
    "logit_bias": ({},),
    "bad_words": ([],),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
    "tools": (),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False, True),
    "parallel_tool_calls": (False, True),
    "include_reasoning": (True,),
}
_PARSER_ARGS: Final = ("--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice")
_DEFAULTS_ARGS: Final = ("--override-generation-config", "--generation-config")


@dataclass(frozen=True, slots=True)
class EngineHabits:
    """What the engines do to every answer, beyond what a request asks.

    Attributes:
        parses_chat: chat answers go through a reasoning or tool parser, which needs all of the
            answer's tokens.
        own_limit: an answer without ``max_tokens`` may have a limit from the model's own
            generation defaults, which must not be counted from token 2.
        own_chat_prompt: chat prompts are not built by the template that ``/tokenize`` uses.
    """

    parses_chat: bool = False
    own_limit: bool = False
    own_chat_prompt: bool = False

    @classmethod
    def of(cls, config: ClusterConfig) -> EngineHabits:
        """Read from vLLM's arguments and the model's folder. Blocking, small files.

        A model that is not a local folder is treated as one with generation defaults.
        """
        args = config.engine.extra_args
        folder = Path(config.model.path)
        facts = _json(folder / "config.json")
        defaults = _json(folder / "generation_config.json")
        harmony = facts.get("model_type") == "gpt_oss"
        return cls(
            parses_chat=harmony or _given(args, _PARSER_ARGS),
            own_limit=not folder.is_dir()
            or "max_new_tokens" in defaults
            or _given(args, _DEFAULTS_ARGS),
            own_chat_prompt=harmony,
        )


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 1 as the PE sampled it.

    Attributes:
        text: its text in the prompt's context; empty for an end token.
        finish_reason: why the answer ends with it, or None when it goes on.
        stop_reason: the stop token's id where it was not the model's own end token.
        created, fingerprint: of the PE's answer.
    """

    token_id: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    created: int
    fingerprint: str | None


def pe_may_sample(call: Call, habits: EngineHabits) -> bool:
    """Whether token 1 may come from the PE."""
    body = call.body
    if call.is_chat and habits.parses_chat:
        return False
    if call.max_tokens is None and habits.own_limit:
        return False
    for key, value in body.items():
        if value is None or key in _FREE:
            continue
        if key == "user" and isinstance(value, str):
            continue
        if key in _FLAGS and isinstance(value, bool):
            continue
        if key == "stream_options" and _plain_options(value):
            continue
        if not any(_same(value, neutral) for neutral in _NEUTRAL.get(key, ())):
            return False
    return True


def sampling_of(call: Call) -> dict[str, Any]:
    """The part of a body that decides how token 1 is drawn."""
    return {key: call.body[key] for key in _SAMPLING if call.body.get(key) is not None}


def read_first_token(answer: bytes, max_tokens: int | None) -> FirstToken | None:
    """Token 1 from the PE's answer to a completion request with ``max_tokens`` 1.

    Returns:
        None when the DE has to sample it after all: it is not whole text yet (part of a
        character), or the answer is unusual in any way.
    """
    try:
        body = msgspec.json.decode(answer)
        (choice,) = body["choices"]
        (token_id,) = choice["token_ids"]
        text, finish = choice["text"], choice["finish_reason"]
        first = FirstToken(
            token_id=int(token_id),
            text=str(text),
            finish_reason="stop" if finish == "stop" else None,
            stop_reason=choice.get("stop_reason"),
            created=int(body["created"]),
            fingerprint=body.get("system_fingerprint"),
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    if finish not in ("stop", "length") or _REPLACEMENT in first.text:
        return None
    if first.finish_reason is None:
        if not first.text:
            return None
        if max_tokens == 1:
            return FirstToken(
                first.token_id, first.text, "length", None, first.created, first.fingerprint
            )
    return first


def continued_body(call: Call) -> dict[str, Any]:
    """The client's body for the DE that continues after token 1: one token less to come."""
    body = dict(call.body)
    if not call.is_chat and "max_tokens" not in body:
        body["max_tokens"] = call.max_tokens
    for key in ("max_tokens", "max_completion_tokens"):
        if body.get(key) is not None:
            body[key] -= 1
    return body


def _plain_options(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"include_usage", "continuous_usage_stats"}
        and all(item is None or isinstance(item, bool) for item in value.values())
    )


def _same(value: object, neutral: object) -> bool:
    # ``1 == True`` in Python, and a client that sends the wrong type must hear so from vLLM.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _given(args: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(arg.split("=", 1)[0].replace("_", "-") in names for arg in args)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return value if isinstance(value, dict) else {}
