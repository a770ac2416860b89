"""The front's pure parts: bodies, who samples token 1, keys, access, proofs of death."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dualpath.config import SecurityConfig, is_loopback, parse
from dualpath.control.host import host_id
from dualpath.serve.auth import require_admin, tenant_of
from dualpath.serve.body import Call, Endpoint, parse_call
from dualpath.serve.errors import ApiError
from dualpath.serve.first_token import (
    EngineHabits,
    continued_body,
    pe_may_sample,
    read_first_token,
    sampling_of,
)
from dualpath.serve.process import identify, is_dead

pytestmark = pytest.mark.unit

PLAIN = EngineHabits()


def chat(**keys: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **keys}
    return parse_call(Endpoint.CHAT, json.dumps(body).encode(), "m")


def text(**keys: Any) -> Call:
    return parse_call(Endpoint.COMPLETION, json.dumps({"prompt": "x", **keys}).encode(), "m")


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"ignore_eos": True}, {"return_token_ids": True}, {"user": "u"}, {"n": 1},
        {"stop": []}, {"stop": None}, {"seed": None}, {"presence_penalty": 0},
        {"logprobs": False}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": None}},
    ],
)  # fmt: skip
def test_plain_sampling_is_the_pes(keys: dict[str, Any]) -> None:
    assert pe_may_sample(chat(**keys), PLAIN)


@pytest.mark.parametrize(
    "keys",
    [
        {"seed": 0}, {"n": 2}, {"logprobs": True}, {"top_logprobs": 2}, {"stop": "a"},
        {"stop": ["a"]}, {"stop_token_ids": [1]}, {"presence_penalty": 0.1},
        {"frequency_penalty": -1}, {"repetition_penalty": 1.1}, {"min_tokens": 1},
        {"logit_bias": {"1": 1}}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "auto"},
        {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}},
        {"echo": True}, {"skip_special_tokens": False}, {"continue_final_message": True},
        {"add_generation_prompt": False}, {"priority": 1}, {"vllm_xargs": {"a": 1}},
        {"something_new": 1}, {"n": True}, {"presence_penalty": False}, {"user": 3},
        {"return_token_ids": "yes"}, {"stream": True, "stream_options": {"else": 1}},
    ],
)  # fmt: skip
def test_anything_else_is_the_des(keys: dict[str, Any]) -> None:
    """Also what is unknown, or of a wrong type that vLLM has to refuse."""
    try:
        call = chat(**keys)
    except ApiError as error:
        assert error.status == 400
        return
    assert not pe_may_sample(call, PLAIN)


def test_habits_of_engines_count() -> None:
    assert not pe_may_sample(chat(), EngineHabits(parses_chat=True))
    assert pe_may_sample(text(), EngineHabits(parses_chat=True))
    unlimited = chat(max_tokens=None)
    assert pe_may_sample(unlimited, PLAIN)
    assert not pe_may_sample(unlimited, EngineHabits(own_limit=True))
    assert pe_may_sample(chat(), EngineHabits(own_limit=True))


def test_habits_are_read(tmp_path: Path) -> None:
    def habits(args: list[str], **files: dict[str, Any]) -> EngineHabits:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        config = parse(
            {
                "model": {"path": str(tmp_path)},
                "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
                "engine": {"extra_args": args},
            }
        )
        return EngineHabits.of(config)

    assert habits([], config={"model_type": "llama"}) == EngineHabits()
    assert habits(["--reasoning-parser=x"]).parses_chat
    assert habits(["--enable_auto_tool_choice"]).parses_chat
    assert habits(["--override-generation-config", "{}"]).own_limit
    assert habits([], generation_config={"max_new_tokens": 5}).own_limit
    assert habits([], config={"model_type": "gpt_oss"}).own_chat_prompt


def answer(**choice: Any) -> bytes:
    full = {"text": " a", "token_ids": [7], "finish_reason": "length", "stop_reason": None}
    return json.dumps({"created": 3, "choices": [{**full, **choice}]}).encode()


def test_first_token_is_read() -> None:
    first = read_first_token(answer(), 5)
    assert first is not None
    assert (first.token_id, first.text, first.finish_reason, first.created) == (7, " a", None, 3)
    assert read_first_token(answer(), 1).finish_reason == "length"  # type: ignore[union-attr]
    end = read_first_token(answer(finish_reason="stop", text=""), 5)
    assert end is not None
    assert end.finish_reason == "stop"


@pytest.mark.parametrize(
    "raw",
    [
        answer(text="\ufffd"), answer(text="ab\ufffd"), answer(text=""), answer(token_ids=[1, 2]),
        answer(token_ids=[]), answer(token_ids=None), answer(finish_reason="abort"),
        answer(finish_reason=None), b"{}", b"x", b"[]", b'{"choices": []}',
    ],
)  # fmt: skip
def test_an_unusual_first_token_is_not_used(raw: bytes) -> None:
    assert read_first_token(raw, 5) is None


def test_the_continued_body_asks_for_one_token_less() -> None:
    assert continued_body(text())["max_tokens"] == 15
    assert continued_body(text(max_tokens=3))["max_tokens"] == 2
    assert continued_body(text(max_tokens=None))["max_tokens"] is None
    both = continued_body(chat(max_completion_tokens=5))
    assert (both["max_tokens"], both["max_completion_tokens"]) == (8, 4)
    assert "max_tokens" not in continued_body(
        parse_call(Endpoint.CHAT, b'{"messages": [{"role": "user", "content": "x"}]}', "m")
    )
    assert sampling_of(chat(temperature=0.5, stop=[])) == {"temperature": 0.5}


def test_what_one_engine_answers_alone() -> None:
    assert text(prompt_logprobs=0).alone
    assert text(echo=True, logprobs=1).alone
    assert text(max_tokens=0).alone
    assert text(truncate_prompt_tokens=3).alone
    assert not text(echo=True).alone
    assert not text(logprobs=1).alone
    assert not chat(logprobs=True).alone


def test_a_batch_of_one_is_one_prompt() -> None:
    assert text(prompt=["only"]).body["prompt"] == "only"
    assert text(prompt=[[1, 2]]).body["prompt"] == [1, 2]


def test_keys_open_doors() -> None:
    security = SecurityConfig(api_keys={"k": "t"}, admin_key="a")
    assert tenant_of({"authorization": "Bearer k"}, security) == "t"
    assert tenant_of({}, SecurityConfig()) == ""
    for headers in ({}, {"authorization": "Bearer "}, {"authorization": "Basic k"}):
        with pytest.raises(ApiError) as caught:
            tenant_of(headers, security)
        assert caught.value.status == 401
    require_admin({"authorization": "bearer a"}, "0.0.0.0", security)
    require_admin({}, "127.0.0.1", SecurityConfig())
    with pytest.raises(ApiError, match="admin key"):
        require_admin({"authorization": "Bearer k"}, "127.0.0.1", security)
    with pytest.raises(ApiError, match="loopback"):
        require_admin({}, "0.0.0.0", SecurityConfig())
    assert [is_loopback(host) for host in ("localhost", "::1", "10.0.0.1", "example")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_death_is_seen() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = identify(host_id(), child.pid)
    assert process is not None
    assert not is_dead(process)
    assert identify("another host", child.pid) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
    assert is_dead(process), "a zombie does no I/O"
    child.wait()
    assert is_dead(process)
    assert identify(host_id(), child.pid) is None


def test_a_number_from_another_namespace_is_not_watched() -> None:
    """In a container of its own, an engine's number names another process here."""
    elsewhere = host_id().rpartition("[")[0] + "[1]"
    assert elsewhere != host_id()
    assert identify(elsewhere, os.getpid()) is None
    assert identify(host_id(), os.getpid()) is not None
