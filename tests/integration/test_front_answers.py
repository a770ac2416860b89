"""The front answers as one engine would: tokens, usage, streams, token 1 from either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_model import EOS, chat_tokens, generate, text_of, tokens_of
from front_kit import BLOCK, make_config, running_cluster

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = [{"role": "user", "content": "how tall is the oldest oak in the park?"}]
IDS = chat_tokens(QUESTION)


def joined(events: list[Any]) -> str:
    pieces = []
    for event in events[:-1]:
        for choice in event["choices"]:
            pieces.append(
                choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            )
    return "".join(pieces)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_equals_one_engine(tmp_path: Path, stream: bool, seed: int | None) -> None:
    body = {"model": "fake", "messages": QUESTION, "max_tokens": 6, "return_token_ids": True}
    if seed is not None:
        body["seed"] = seed
    expected = generate(IDS, 6)
    async with running_cluster(make_config(tmp_path)) as cluster:
        if stream:
            status, events, headers = await cluster.stream(
                CHAT, {**body, "stream_options": {"include_usage": True}}
            )
            assert status == 200
            assert events[-1] == "[DONE]"
            chunks = events[:-1]
            assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:-1]] == [
                "assistant", *[None] * 6,
            ]  # fmt: skip
            assert joined(events) == text_of(expected)
            assert chunks[0]["prompt_token_ids"] == IDS
            got = [t for c in chunks[1:-1] for t in c["choices"][0]["token_ids"]]
            assert got == expected
            finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
            assert finishes == [None] * 6 + ["length"]
            assert chunks[-1]["choices"] == []
            usage = chunks[-1]["usage"]
            assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        else:
            status, answer, headers = await cluster.post(CHAT, body)
            assert status == 200
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == text_of(expected)
            assert choice["token_ids"] == expected
            assert answer["prompt_token_ids"] == IDS
            usage = answer["usage"]
        assert usage == {
            "prompt_tokens": len(IDS), "completion_tokens": 6, "total_tokens": len(IDS) + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip
        assert headers["x-dualpath-first-token"] == ("pe" if seed is None else "de")
        await cluster.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_of_token_ids(tmp_path: Path, stream: bool) -> None:
    ids = tokens_of("once upon a time there was")
    body = {"model": "fake", "prompt": ids, "max_tokens": 5, "return_token_ids": True}
    expected = generate(ids, 5)
    async with running_cluster(make_config(tmp_path)) as cluster:
        if stream:
            _, events, _ = await cluster.stream(TEXT, body)
            choices = [event["choices"][0] for event in events[:-1]]
            assert [t for choice in choices for t in choice["token_ids"]] == expected
            assert [choice["prompt_token_ids"] for choice in choices] == [ids, *[None] * 4]
            assert joined(events) == text_of(expected)
            assert "usage" not in events[-2]
        else:
            _, answer, _ = await cluster.post(TEXT, body)
            (choice,) = answer["choices"]
            assert (choice["text"], choice["token_ids"]) == (text_of(expected), expected)
            assert choice["prompt_token_ids"] == ids
        assert [path for path, _ in cluster.de.bodies] == [TEXT], "token ids need no tokenizer"
        await cluster.idle()


async def test_default_length_counts_the_first_token(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        _, answer, headers = await cluster.post(TEXT, {"model": "fake", "prompt": "hello there"})
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["text"] == text_of(generate(tokens_of("hello there"), 16))
        assert headers["x-dualpath-first-token"] == "pe"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", ["length", "stop"])
async def test_an_answer_of_one_token(tmp_path: Path, chat: bool, stream: bool, why: str) -> None:
    """No decode request is made; the prompt's blocks are still made durable."""
    path = CHAT if chat else TEXT
    ids = IDS if chat else tokens_of("a prompt of some length")
    body: dict[str, Any] = {"model": "fake", "max_tokens": 1 if why == "length" else 9}
    body |= {"messages": QUESTION} if chat else {"prompt": ids}
    async with running_cluster(make_config(tmp_path)) as cluster:
        if why == "stop":
            cluster.pe.eos_at = cluster.de.eos_at = len(ids)
        token = generate(ids, 1, cluster.pe.eos_at)
        body["return_token_ids"] = True
        if stream:
            _, events, _ = await cluster.stream(
                path, {**body, "stream_options": {"include_usage": True}}
            )
            assert joined(events) == text_of(token)
            finishes = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
            assert finishes[-1] == why
            assert finishes.count(None) == len(finishes) - 1
            got = [t for e in events[:-1] for c in e["choices"] for t in c.get("token_ids") or ()]
            assert got == token
            usage = events[-2]["usage"]
        else:
            _, answer, _ = await cluster.post(path, body)
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if chat else choice["text"]
            assert (text, choice["finish_reason"]) == (text_of(token), why)
            assert choice["token_ids"] == token
            usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 1)
        assert [p for p, _ in cluster.de.bodies if p == path] == []
        assert len(cluster.shared.stored) == len(ids) // BLOCK
        await cluster.idle()


async def test_continuous_usage_counts_the_first_token(tmp_path: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "fake", "messages": QUESTION, "max_tokens": 4, "stream_options": options}
    async with running_cluster(make_config(tmp_path)) as cluster:
        _, events, headers = await cluster.stream(CHAT, body)
        assert headers["x-dualpath-first-token"] == "pe"
        counts = [
            (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
            for event in events[:-1]
        ]
        assert counts == [(len(IDS), count) for count in (0, 1, 2, 3, 4, 4)]


@pytest.mark.parametrize("text", ["\ufffd", ""])
async def test_half_a_character_is_left_to_the_de(tmp_path: Path, text: str) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.pe.first_text = text
        _, answer, headers = await cluster.chat("hello", max_tokens=4)
        ids = chat_tokens([{"role": "user", "content": "hello"}])
        assert answer["choices"][0]["message"]["content"] == text_of(generate(ids, 4))
        assert headers["x-dualpath-first-token"] == "de"
        assert answer["usage"]["completion_tokens"] == 4


async def test_the_end_token_in_the_middle(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.pe.eos_at = cluster.de.eos_at = len(IDS) + 2
        _, answer, _ = await cluster.post(
            CHAT, {"messages": QUESTION, "max_tokens": 50, "return_token_ids": True}
        )
        (choice,) = answer["choices"]
        assert choice["token_ids"][-1] == EOS
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3


async def test_the_next_turn_hits_the_last(tmp_path: Path) -> None:
    """The answer ends only when its blocks are published, so the next prompt hits them all."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        first = tokens_of("x" * 30)
        _, answer, _ = await cluster.post(
            TEXT, {"prompt": first, "max_tokens": 11, "return_token_ids": True}
        )
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        second = first + answer["choices"][0]["token_ids"] + tokens_of("and more of it")
        stored = (len(first) + 10) // BLOCK * BLOCK  # the last token's KV was never computed
        _, answer, headers = await cluster.post(TEXT, {"prompt": second, "max_tokens": 3})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": stored}
        assert headers["x-dualpath-hit-tokens"] == str(stored)
        assert headers["x-dualpath-path"] in ("pe", "de")
        state = await cluster.get("/debug/state")
        bytes_read = stored // BLOCK * 2 * BLOCK * 16
        assert state["path"]["pe"] + state["path"]["de"] == bytes_read
        await cluster.idle()


async def test_a_full_hit_leaves_one_block_to_compute(tmp_path: Path) -> None:
    ids = tokens_of("y" * 4 * BLOCK)
    async with running_cluster(make_config(tmp_path)) as cluster:
        body = {"prompt": ids, "max_tokens": 2}
        await cluster.post(TEXT, body)
        _, answer, _ = await cluster.post(TEXT, body)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3 * BLOCK}
        await cluster.idle()


@pytest.mark.parametrize("lost", [0, 2, 4])
async def test_a_missing_block_is_computed_again(tmp_path: Path, lost: int) -> None:
    """What lies behind a gap is not used, and the index forgets the block."""
    ids = tokens_of("z" * 45)
    async with running_cluster(make_config(tmp_path, mode="split")) as cluster:
        body = {"prompt": ids, "max_tokens": 2}
        _, plain, _ = await cluster.post(TEXT, body)
        session_keys = sorted(cluster.shared.stored)
        assert len(session_keys) == 5
        from dualpath.blocks import chain_keys

        root = session_keys[0][0]
        cluster.shared.stored.discard((root, chain_keys(root, ids, BLOCK)[lost]))
        for expected in (lost, 5):
            _, answer, _ = await cluster.post(TEXT, body)
            assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == expected * BLOCK
        await cluster.idle()


async def test_alone_requests_use_no_session(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        status, answer, headers = await cluster.post(
            TEXT, {"prompt": "hello", "max_tokens": 3, "prompt_logprobs": 1}
        )
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == 5
        assert headers["x-dualpath-path"] == "none"
        assert cluster.pe.bodies == []
        assert "kv_transfer_params" not in cluster.de.bodies[-1][1]
        await cluster.idle()
