"""The replay client against a real streaming server: counts, tokens, order, failures."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAIServer, answer_ids, running

from dualpath.workload.agents import ChatAgent, Conversation, corpus_conversations, token_agents
from dualpath.workload.compare import compare
from dualpath.workload.options import Progress, ReplayOptions, ReplayResult
from dualpath.workload.records import RecordError, read_records
from dualpath.workload.replay import arrivals_s, replay
from dualpath.workload.stream import RequestFailed
from dualpath.workload.synth import regular
from dualpath.workload.trace import Round, Trajectory

pytestmark = pytest.mark.integration

TRAJECTORIES = [
    Trajectory("a", (Round(130, 5, 0.0), Round(70, 1, 0.0), Round(0, 3, None))),
    Trajectory("b", (Round(1, 2, 0.0), Round(300, 0, 0.0), Round(20, 4, None))),
]


async def run(server: OpenAIServer, count: int = 2, **options: Any) -> ReplayResult:
    options = {"url": server.url, "timeout_s": 20.0, **options}
    return await replay(token_agents(TRAJECTORIES, count, seed=7), ReplayOptions(**options))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited 10 s in vain")


async def test_prompts_are_everything_before_plus_the_append() -> None:
    async with running(OpenAIServer()) as server:
        result = await run(server, count=4)
    by_agent: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for prompt in server.prompts:
        by_agent[tuple(prompt[:1])].append(prompt)
    assert len(by_agent) == 4
    lengths = sorted([len(prompt) for prompt in prompts] for prompts in by_agent.values())
    assert lengths == [[1, 323], [1, 323], [130, 205, 206], [130, 205, 206]]
    for prompts in by_agent.values():
        for before, after in itertools.pairwise(prompts):
            gen = {130: 5, 205: 1, 1: 2}[len(before)]
            assert after[: len(before) + gen] == before + answer_ids(before, gen)
        assert all(100 <= token < 8192 for prompt in prompts for token in prompt)
    figures = result.figures
    assert result.ok
    assert (figures.agents, figures.agents_done) == (4, 4)
    assert (figures.requests, figures.failed, figures.not_sent, figures.retries) == (10, 0, 0, 0)
    assert figures.tokens_in == 2 * (130 + 205 + 206 + 1 + 323) == sum(map(len, server.prompts))
    assert figures.tokens_out == 2 * (5 + 1 + 3 + 2 + 4)
    assert figures.cached_tokens == 2 * (128 + 192 + 192 + 0 + 320)
    assert (figures.mode, figures.snic, figures.path) == (None, None, None)


async def test_requests_ask_for_exact_greedy_streams() -> None:
    async with running(OpenAIServer()) as server:
        await run(server, api_key="secret")
        await run(server, model="other")
    first, last = server.bodies[0], server.bodies[-1]
    assert first["model"] == "tiny"
    assert last["model"] == "other"
    assert first["temperature"] == 0
    assert first["ignore_eos"] is True
    assert first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert server.keys[0] == "Bearer secret"
    assert server.keys[-1] == ""
    assert set(server.paths) == {"/v1/completions"}


async def test_records_hold_every_answer_and_equal_runs_compare_equal(tmp_path: Path) -> None:
    async with running(OpenAIServer()) as server:
        result = await run(server, out=tmp_path / "one")
        await run(server, out=tmp_path / "two")
        with pytest.raises(RecordError, match="exists already"):
            await run(server, out=tmp_path / "one")
    written = list(read_records(tmp_path / "one"))
    assert written == list(result.records)
    prompts = {len(prompt): prompt for prompt in server.prompts}
    for record in written:
        assert record.prompt_tokens is not None
        expected = answer_ids(prompts[record.prompt_tokens], record.asked_tokens)
        assert record.token_ids == tuple(expected)
        assert record.text == "".join(f" w{token}" for token in expected)
        assert record.finish_reason == "length"
        assert record.headers == {"x-dualpath-first-token": "pe"}
    outcome = compare(written, read_records(tmp_path / "two"))
    assert outcome.equal
    assert (outcome.requests, outcome.tokens, outcome.by_text) == (5, 15, 0)


async def test_times_need_as_many_tokens_as_they_speak_of() -> None:
    async with running(OpenAIServer()) as server:
        result = await run(server)
    for record in result.records:
        assert record.ttft_s is not None and record.total_s is not None
        assert 0 < record.ttft_s <= record.total_s
        assert (record.ttst_s is not None) == (record.completion_tokens >= 2)
        assert (record.tpot_s is not None) == (record.completion_tokens >= 3)


async def test_several_tokens_in_a_chunk_are_counted_by_their_ids() -> None:
    async with running(OpenAIServer(tokens_per_chunk=3)) as server:
        result = await run(server)
    assert result.ok
    by_length = {record.completion_tokens: record for record in result.records}
    assert by_length[3].ttst_s == 0
    assert by_length[5].ttst_s == 0
    assert by_length[5].tpot_s is not None


async def test_a_server_without_token_ids_is_said_so_or_stood_in_for() -> None:
    async with running(OpenAIServer(give_ids=False)) as server:
        refused = await run(server)
        assert refused.figures.failures == {"no_ids": 2}
        assert refused.figures.not_sent == 2 + 1
        server.bodies.clear()
        agents = token_agents(TRAJECTORIES, 2, seed=7, stand_in=True)
        result = await replay(agents, ReplayOptions(url=server.url, timeout_s=20))
    assert result.ok
    assert sorted(map(len, server.prompts)) == [1, 130, 205, 206, 323]
    assert not any("return_token_ids" in body for body in server.bodies)


async def test_a_5xx_is_tried_again_as_often_as_allowed() -> None:
    def faults(number: int, body: dict[str, Any]) -> str:
        return "503" if number in (0, 1) else ""

    async with running(OpenAIServer(faults=faults)) as server:
        result = await replay(
            token_agents(TRAJECTORIES[:1], 1, seed=7),
            ReplayOptions(url=server.url, retries=2, timeout_s=20),
        )
    assert result.ok
    assert (result.figures.requests, result.figures.retries) == (3, 2)
    assert [record.attempts for record in result.records] == [3, 1, 1]
    assert server.prompts[0] == server.prompts[1] == server.prompts[2]


@pytest.mark.parametrize(
    ("fault", "kind", "tries"),
    [
        ("503", "server", 2),
        ("error", "server", 2),
        ("late-error", "server", 1),
        ("400", "refused", 1),
        ("reset", "connection", 2),
        ("cut", "connection", 1),
        ("end", "stream", 1),
        ("garbage", "stream", 1),
        ("miscount", "stream", 1),
        ("long", "length", 1),
        ("short", "length", 1),
    ],
)
async def test_a_failure_ends_its_agent_only(
    fault: str, kind: str, tries: int, tmp_path: Path
) -> None:
    def faults(number: int, body: dict[str, Any]) -> str:
        return fault if len(body["prompt"]) == 130 else ""

    async with running(OpenAIServer(faults=faults)) as server:
        result = await run(server, retries=1, out=tmp_path / "run")
    figures = result.figures
    assert not result.ok
    assert figures.failures == {kind: 1}
    assert (figures.requests, figures.failed, figures.not_sent) == (3, 1, 2)
    assert (figures.agents_done, figures.retries) == (1, tries - 1)
    assert figures.tokens_out == 2 + 4
    assert not figures.slo.met
    failed = [record for record in read_records(tmp_path / "run") if not record.ok]
    assert [(record.agent, record.round, record.failure) for record in failed] == [(0, 0, kind)]
    assert failed[0].error and "\n" not in failed[0].error
    assert failed[0].attempts == tries == sum(len(prompt) == 130 for prompt in server.prompts)


async def test_every_request_has_a_deadline() -> None:
    def faults(number: int, body: dict[str, Any]) -> str:
        return "hang" if len(body["prompt"]) == 130 else ""

    async with running(OpenAIServer(faults=faults)) as server:
        result = await run(server, timeout_s=0.5, retries=3)
    assert result.figures.failures == {"deadline": 1}
    assert result.figures.agents_done == 1
    assert sum(len(prompt) == 130 for prompt in server.prompts) == 1


async def test_stop_keeps_what_was_measured(tmp_path: Path) -> None:
    def faults(number: int, body: dict[str, Any]) -> str:
        return "hang" if len(body["prompt"]) in (206, 323) else ""

    async with running(OpenAIServer(faults=faults)) as server:
        stop = asyncio.Event()

        async def press() -> None:
            await until(lambda: len(server.bodies) == 5 and server.open_now == 2)
            stop.set()

        presser = asyncio.create_task(press())
        options = ReplayOptions(url=server.url, timeout_s=20, out=tmp_path / "run")
        result = await replay(token_agents(TRAJECTORIES, 2, seed=7), options, stop=stop)
        await presser
        server.release.set()
        await until(lambda: server.open_now == 0)
    assert result.figures.interrupted
    assert not result.ok
    assert not result.figures.slo.met
    assert (result.figures.requests, result.figures.failed, result.figures.not_sent) == (3, 0, 2)
    assert list(read_records(tmp_path / "run")) == list(result.records)


async def test_stop_after_the_end_is_no_interruption() -> None:
    async with running(OpenAIServer()) as server:
        stop = asyncio.Event()
        agents = token_agents(TRAJECTORIES, 2, seed=7)
        result = await replay(agents, ReplayOptions(url=server.url, timeout_s=20), stop=stop)
    assert result.ok


async def test_offline_agents_overlap_and_online_ones_come_by_the_seed() -> None:
    async with running(OpenAIServer(faults=lambda number, body: "hang")) as server:

        async def open_gate() -> None:
            await until(lambda: server.open_now == 6)
            server.release.set()

        opener = asyncio.create_task(open_gate())
        agents = token_agents(list(regular(6, 1, 20, 3)), 6, seed=1)
        result = await replay(agents, ReplayOptions(url=server.url, timeout_s=20))
        await opener
    assert result.ok
    assert server.most_open == 6

    assert arrivals_s(5, None, 3) == [0.0] * 5
    times = arrivals_s(4000, 0.5, 3)
    assert times == arrivals_s(4000, 0.5, 3) != arrivals_s(4000, 0.5, 4)
    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(2.0, rel=0.05)
    async with running(OpenAIServer()) as server:
        agents = token_agents(list(regular(8, 1, 20, 3)), 8, seed=1)
        online = await replay(agents, ReplayOptions(url=server.url, aps=40.0, timeout_s=20))
    due = arrivals_s(8, 40.0, 0)
    started = {record.agent: record.start_s for record in online.records}
    assert all(started[number] >= due[number] for number in range(8))
    assert online.figures.aps == 40.0


async def test_tool_latency_is_waited_for_and_can_be_scaled_away() -> None:
    slow = [Trajectory("s", (Round(5, 2, 30.0), Round(5, 2, 99.0)))]
    async with running(OpenAIServer()) as server:
        options = ReplayOptions(url=server.url, timeout_s=20, latency_scale=0.01)
        result = await replay(token_agents(slow, 1, seed=1), options)
        assert result.records[1].start_s - result.records[0].start_s >= 0.3
        assert result.figures.jct_s is not None
        assert 0.3 <= result.figures.jct_s < 0.9  # the last round's latency is not waited for
        options = ReplayOptions(url=server.url, timeout_s=20, latency_scale=0)
        assert (await replay(token_agents(slow, 1, seed=1), options)).ok


async def test_chat_sends_the_answers_back() -> None:
    talk = Conversation("talk", ("Hello?", "And then?"), (4, 2), system="Be brief.")
    async with running(OpenAIServer()) as server:
        result = await replay([ChatAgent(talk)], ReplayOptions(url=server.url, timeout_s=20))
    assert result.ok
    assert set(server.paths) == {"/v1/chat/completions"}
    first, second = (body["messages"] for body in server.bodies)
    assert first == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
    ]
    assert second == [
        *first,
        {"role": "assistant", "content": result.records[0].text},
        {"role": "user", "content": "And then?"},
    ]
    assert [body["max_tokens"] for body in server.bodies] == [4, 2]
    assert not any("ignore_eos" in body for body in server.bodies)
    ids = answer_ids(list(json.dumps(first).encode()), 4)
    assert result.records[0].token_ids == tuple(ids)


async def test_chat_answers_may_end_early_unless_exact_but_never_late() -> None:
    talk = Conversation("talk", ("Hello?",), (4,))
    for fault, exact, ok in (
        ("short", False, True),
        ("short", True, False),
        ("long", False, False),
    ):
        async with running(OpenAIServer(faults=lambda n, b, fault=fault: fault)) as server:
            agent = ChatAgent(talk, exact=exact)
            result = await replay([agent], ReplayOptions(url=server.url, timeout_s=20))
        assert result.ok is ok


async def test_chat_from_a_corpus() -> None:
    corpus = " ".join(f"word{n}" for n in range(100))
    talks = list(corpus_conversations(corpus, TRAJECTORIES, seed=2))
    assert talks == list(corpus_conversations(corpus, TRAJECTORIES, seed=2))
    assert [len(text.split()) for text in talks[0].users] == [98, 52, 1]
    words = " ".join(talks[0].users).split()
    start = int(words[0].removeprefix("word"))
    assert words == [f"word{(start + n) % 100}" for n in range(len(words))]
    async with running(OpenAIServer()) as server:
        agents = [ChatAgent(talk, exact=True) for talk in talks]
        result = await replay(agents, ReplayOptions(url=server.url, timeout_s=20))
    assert result.ok
    assert result.figures.tokens_out == 15


async def test_a_fronts_totals_are_this_runs_share() -> None:
    front = {
        "mode": "dualpath",
        "snic": {"n0": 1000, "n1": 50},
        "path": {"pe": 10, "de": 20, "split": 0},
        "sessions": 0,
    }

    def faults(number: int, body: dict[str, Any]) -> str:
        front["snic"] = {"n0": 1000 + 7 * (number + 1), "n1": 50, "n2": 3}
        front["path"] = {"pe": 10, "de": 20 + 7 * (number + 1), "split": 3}
        return ""

    async with running(OpenAIServer(front=front, faults=faults)) as server:
        result = await run(server)
    assert result.figures.mode == "dualpath"
    assert result.figures.snic == {"n0": 35, "n1": 0, "n2": 3}
    assert result.figures.path == {"pe": 0, "de": 35, "split": 3}


async def test_a_front_that_restarted_gives_no_figures() -> None:
    front: dict[str, Any] = {"mode": "basic", "snic": {"n0": 1000}, "path": {"pe": 10}}

    def faults(number: int, body: dict[str, Any]) -> str:
        front["snic"] = {"n0": 5}
        return ""

    async with running(OpenAIServer(front=front, faults=faults)) as server:
        result = await run(server)
    assert result.ok
    assert (result.figures.snic, result.figures.path) == (None, None)


async def test_progress_counts_every_request() -> None:
    seen: list[Progress] = []
    async with running(OpenAIServer()) as server:
        agents = token_agents(TRAJECTORIES, 2, seed=7)
        await replay(agents, ReplayOptions(url=server.url), progress=seen.append)
    assert [item.requests_done for item in seen if item.agents_done == 0] == [1, 2, 3, 4]
    last = seen[-1]
    assert (last.requests_done, last.requests_total) == (5, 5)
    assert (last.agents_done, last.agents_total, last.failed) == (2, 2, 0)
    assert last.tokens_out == 15


async def test_an_endpoint_that_is_not_there() -> None:
    with pytest.raises(RequestFailed, match=r"127\.0\.0\.1:9/v1/models"):
        await replay(
            token_agents(TRAJECTORIES, 1, seed=1), ReplayOptions(url="http://127.0.0.1:9/v1/")
        )
    with pytest.raises(ValueError, match="no agents"):
        await replay([], ReplayOptions(url="http://127.0.0.1:9"))
