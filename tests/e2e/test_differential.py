"""The same bodies to the front and to one plain vLLM: the same answers but for ids and times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_kit import Api

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LOGPROB_TOLERANCE = 1e-4
# Of one answer only, or of one deployment only.
OWN = frozenset({"id", "created", "system_fingerprint", "cached_tokens"})
NUMBERS = frozenset({"logprob", "token_logprobs", "top_logprobs"})

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Count the stones on the beach, one after the other. " * 8},
]
PROMPT = "Once upon a time, in a village by the sea, there lived an old fisherman. " * 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}

# vLLM on CPU dies of a seeded request whose prompt takes two steps (its generator cannot be set
# back), so two answers to one prompt must fit the 256 tokens of a step here.
#
# Answered alike on both endpoints. All but the last few are greedy, or seeded, so that the text
# is comparable.
BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "stop string": {"stop": ["a", "e"]},
    "stop string included": {"stop": "e", "include_stop_str_in_output": True},
    "stop that never comes": {"stop": ["never to be seen"]},
    "stop token ids": {"stop_token_ids": list(range(100, 30_000)), "min_tokens": 3},
    "minimum": {"min_tokens": 8, "max_tokens": 8},
    "ignore eos": {"ignore_eos": True, "max_tokens": 30},
    "seed": {"temperature": 0.9, "seed": 1234},
    "seed and nucleus": {"temperature": 1.3, "top_p": 0.7, "top_k": 40, "seed": 7},
    "seed and minimum probability": {"temperature": 1.3, "min_p": 0.05, "seed": 8},
    "nucleus of one": {"temperature": 1.0, "top_k": 1},
    "several greedy": {"n": 2, "temperature": 0.8, "seed": 3},
    "frequency": {"frequency_penalty": 1.5, "max_tokens": 24},
    "presence": {"presence_penalty": 1.5, "max_tokens": 24},
    "repetition": {"repetition_penalty": 1.4, "max_tokens": 24},
    "bias": {"logit_bias": {"100": 100.0, "101": -100.0}},
    "bad words": {"bad_words": ["the", " sea"]},
    "allowed tokens": {"allowed_token_ids": [300, 301, 302]},
    "ids": {"return_token_ids": True},
    "raw tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "user": {"user": "somebody"},
    "structured": {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}},
    "structured choice": {"structured_outputs": {"choice": ["left", "right"]}},
    "unknown field": {"no_such_field": 1},
    "priority": {"priority": 0},
    # Refused, and alike.
    "too hot": {"temperature": -1.0},
    "hot text": {"temperature": "warm"},
    "top_p of two": {"top_p": 2.0},
    "top_k below": {"top_k": -7},
    "penalty of nine": {"frequency_penalty": 9.0},
    "no tokens below": {"max_tokens": -3},
    "n of none": {"n": 0},
    "n as text": {"n": "two"},
    "stop of numbers": {"stop": [1, 2]},
    "minimum above most": {"min_tokens": 50, "max_tokens": 5},
    "too long": {"max_tokens": 5000},
    "bias out of the vocabulary": {"logit_bias": {"99999999": 1.0}},
    "bad structure": {"structured_outputs": {"regex": "("}},
    "seed as text": {"seed": "x"},
    "other model": {"model": "another"},
    "stream as text": {"stream": "maybe"},
    "usage without a stream": {"stream_options": {"include_usage": True}, "stream": False},
}
CHATS: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": True, "top_logprobs": 3},
    "log probabilities alone": {"logprobs": True},
    "most log probabilities without any": {"top_logprobs": 3},
    "too many log probabilities": {"logprobs": True, "top_logprobs": 1000},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        "max_tokens": 60,
    },
    "text format": {"response_format": {"type": "text"}},
    "unknown format": {"response_format": {"type": "poem"}},
    "tools": {"tools": TOOLS},
    "tools, none": {"tools": TOOLS, "tool_choice": "none"},
    "tools, one named": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 60,
    },
    "tools, required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
    "tools, automatic": {"tools": TOOLS, "tool_choice": "auto"},
    "tools, unknown name": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "tide"}},
    },
    "choice without tools": {"tool_choice": "required"},
    "completion tokens": {"max_completion_tokens": 5, "max_tokens": None},
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "no generation prompt": {"add_generation_prompt": False},
    "go on": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "One stone, two"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "go on from nothing": {"continue_final_message": True},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How deep is the sea?"}]}
        ]
    },
    "echo": {"echo": True},
    "prompt log probabilities": {"prompt_logprobs": 1},
    "no messages": {"messages": []},
    "messages missing": {"messages": None},
    "messages as text": {"messages": "hello"},
    "role missing": {"messages": [{"content": "hello"}]},
}
TEXTS: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 3},
    "log probabilities of the chosen": {"logprobs": 0},
    "too many log probabilities": {"logprobs": 1000},
    "echo": {"echo": True},
    "echo and log probabilities": {"echo": True, "logprobs": 2, "max_tokens": 3},
    "echo of nothing more": {"echo": True, "max_tokens": 0},
    "prompt log probabilities": {"prompt_logprobs": 1},
    "suffix": {"suffix": "the end"},
    "ids in": {"prompt": list(range(200, 400))},
    "one list of ids": {"prompt": [list(range(200, 300))]},
    "one text in a list": {"prompt": [PROMPT]},
    "default length": {"max_tokens": None},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA},
        },
        "max_tokens": 60,
    },
    "empty prompt": {"prompt": ""},
    "prompt missing": {"prompt": None},
    "prompt of numbers": {"prompt": 7},
    "ids out of the vocabulary": {"prompt": [99_999_999]},
    "best of fewer": {"best_of": 1, "n": 1},
    "whole length": {"prompt": list(range(200, 240)) * 60},
}


def cases() -> Iterator[Any]:
    for path, base, own in (
        (CHAT, {"messages": MESSAGES}, CHATS),
        (TEXT, {"prompt": PROMPT}, TEXTS),
    ):
        kind = "chat" if path == CHAT else "text"
        for name, changes in {**BOTH, **own}.items():
            body = {"model": "tiny", "max_tokens": 12, "temperature": 0, **base, **changes}
            for key, value in changes.items():
                if value is None:
                    del body[key]
            for stream in (False, True):
                if stream and "stream" in changes:
                    continue
                sent = {**body, "stream": True} if stream else body
                suffix = "stream" if stream else "whole"
                yield pytest.param(path, sent, id=f"{kind}: {name}: {suffix}")


async def ask(api: Api, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and answer; a stream's answer is the list of its events."""
    async with api.session.post(api.url + path, json=body) as response:
        raw = await response.text()
        if not response.headers["content-type"].startswith("text/event-stream"):
            return response.status, json.loads(raw)
        blocks = [block.removeprefix("data: ") for block in raw.split("\n\n") if block]
        assert blocks[-1] == "[DONE]"
        return response.status, [json.loads(block) for block in blocks[:-1]]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as one answer: how tokens were grouped into chunks is a matter of time."""
    choices: dict[int, dict[str, Any]] = {}
    keys: set[str] = set()
    rest: list[Any] = []
    for event in events:
        keys |= event.keys()
        if not event.get("choices"):
            rest.append({key: value for key, value in event.items() if key != "choices"})
        for choice in event.get("choices") or ():
            collect(choices.setdefault(choice["index"], {}), choice)
    last = events[-1]
    usage = [event["choices"] for event in events if event.get("usage") is not None]
    return {
        "choices": [choices[index] for index in sorted(choices)],
        "keys": keys,
        "rest": rest,
        "usage": last.get("usage"),
        "events with usage": usage,
    }


def collect(into: dict[str, Any], piece: Any) -> None:
    for key, value in piece.items():
        before = into.get(key)
        if key == "tool_calls":
            calls = into.setdefault(key, {})
            for call in value or ():
                collect(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            if before is None:
                before = into[key] = {}
            collect(before, value)
        elif isinstance(value, list):
            into[key] = (before or []) + value
        elif key in ("text", "content", "arguments", "reasoning"):
            into[key] = (before or "") + (value or "")
        elif value is not None or key not in into:
            into[key] = value


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two answers differ, but for what belongs to one answer only."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted((ours.keys() | theirs.keys()) - OWN, key=str):
            if key == "prompt_tokens_details":
                continue
            a, b = ours.get(key, "absent"), theirs.get(key, "absent")
            found += differences(a, b, f"{where}.{key}")
        return found
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = zip(ours, theirs, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{where}[{i}]")]
    if (
        isinstance(ours, float)
        and isinstance(theirs, float)
        and any(name in where for name in NUMBERS)
    ):
        same = abs(ours - theirs) <= LOGPROB_TOLERANCE
    elif where.endswith((".tool_calls[0].id", ".tool_calls.0.id")):
        same = isinstance(ours, str) and isinstance(theirs, str)
    else:
        same = ours == theirs
    return [] if same else [f"{where}: {ours!r} != {theirs!r}"]


def sampled() -> Iterator[Any]:
    """Every fifth case is part of ``make test``, the others of ``make test-full``."""
    for number, case in enumerate(cases()):
        marks = [pytest.mark.full] if number % 5 else []
        yield pytest.param(*case.values, id=case.id, marks=marks)


@pytest.mark.parametrize(("path", "body"), list(sampled()))
async def test_answers_alike(front: Api, plain: Api, path: str, body: dict[str, Any]) -> None:
    """Twice, because the second time the prompt's KV comes from storage."""
    status, expected = await ask(plain, path, body)
    if isinstance(expected, list) and "error" in expected[0]:
        # The front says so by the status, as long as nothing has been sent.
        (expected,) = expected
        status = expected["error"]["code"]
    for turn in ("computed", "loaded"):
        got_status, got = await ask(front, path, body)
        assert got_status == status, (turn, got, expected)
        if status != 200:
            detail, wanted = got["error"], expected["error"]
            assert detail.keys() == wanted.keys()
            assert (detail["type"], detail["code"]) == (wanted["type"], wanted["code"]), detail
            continue
        if isinstance(expected, list):
            assert differences(joined(got), joined(expected)) == [], turn
        else:
            assert differences(got, expected) == [], turn


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("sampler", ["pe", "de"])
async def test_usage_in_streams(front: Api, plain: Api, path: str, sampler: str) -> None:
    """Asked for: the last chunk, without choices. Not asked for: nowhere."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "temperature": 0, "stream": True}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    if sampler == "de":
        body["seed"] = 5
    for options in (
        None,
        {"include_usage": False},
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ):
        asked = body if options is None else {**body, "stream_options": options}
        _, ours = await ask(front, path, asked)
        _, theirs = await ask(plain, path, asked)
        for events in (ours, theirs):
            with_usage = [event for event in events if event.get("usage") is not None]
            if options is None or not options["include_usage"]:
                assert with_usage == []
            else:
                assert events[-1]["choices"] == []
                assert events[-1]["usage"]["completion_tokens"] == 9
                if "continuous_usage_stats" in options:
                    assert len(with_usage) == len(events)
                else:
                    assert with_usage == [events[-1]]
        assert differences(joined(ours)["usage"], joined(theirs)["usage"]) == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}", b"7"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_malformed_bodies(front: Api, plain: Api, path: str, raw: bytes) -> None:
    answers = []
    for api in (front, plain):
        headers = {"content-type": "application/json"}
        async with api.session.post(api.url + path, data=raw, headers=headers) as response:
            answers.append((response.status, (await response.json())["error"].keys()))
    assert answers[0][0] == answers[1][0] == 400
    assert answers[0] == answers[1]


async def test_seeded_prompt_of_several_steps(front: Api) -> None:
    """Alone on one engine, the prompt takes three steps, each of which draws a token too many; a
    plain vLLM on CPU does not survive that. Over the read paths it is a single step."""
    prompt = [100 + 7919 * index % 40_000 for index in range(600)]
    seeded = {"temperature": 1.0, "seed": 5}
    alone = await front.tokens(prompt, 12, prompt_logprobs=0, **seeded)
    for _ in ("computed", "loaded"):
        assert await front.tokens(prompt, 12, **seeded) == alone
