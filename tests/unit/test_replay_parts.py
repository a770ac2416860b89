"""Pure parts of the replay client: event parsing, token times, agents, figures, comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.workload.agents import ChatAgent, Conversation, TokenAgent, token_agents
from dualpath.workload.compare import compare
from dualpath.workload.front import FrontTotals
from dualpath.workload.measure import Meter, Spread, rank
from dualpath.workload.options import ReplayOptions
from dualpath.workload.records import RecordError, RecordWriter, RequestRecord, read_records
from dualpath.workload.sse import EventParser
from dualpath.workload.stream import Answer, AnswerStream, Failure, RequestFailed, Stopwatch
from dualpath.workload.trace import Round, Trajectory

pytestmark = pytest.mark.unit

ANSWER = Answer(
    text="x", token_ids=(7, 8), completion_tokens=2, prompt_tokens=None, cached_tokens=None,
    finish_reason="length", ttft_s=1.0, ttst_s=0.5, tpot_s=None, total_s=2.0, attempts=1,
    headers={},
)  # fmt: skip


# ---- events ----------------------------------------------------------------------------------


@given(st.data())
def test_events_do_not_depend_on_how_the_bytes_arrive(data: st.DataObject) -> None:
    stream = (
        b': hi\n\ndata: {"a": 1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n\ndata: [DONE]\n\n'
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    parser = EventParser()
    seen: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen += parser.feed(stream[start:end])
    assert seen == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    assert not parser.pending


def test_an_unfinished_event_is_pending() -> None:
    parser = EventParser()
    assert list(parser.feed(b"data: x\n")) == []
    assert parser.pending


# ---- token times -----------------------------------------------------------------------------


def test_times_by_hand() -> None:
    watch = Stopwatch(start_s=10.0)
    for tokens, now_s in ((0, 10.5), (1, 11.0), (1, 11.25), (0, 12.0), (2, 12.25), (1, 12.5)):
        watch.count(tokens, now_s)
    assert watch.tokens == 5
    assert watch.ttft_s == 1.0
    assert watch.ttst_s == 0.25
    assert watch.tpot_s == (12.5 - 11.25) / 3


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_times_of_any_chunking(chunks: list[int]) -> None:
    watch = Stopwatch(start_s=0.0)
    arrivals: list[float] = []
    for index, tokens in enumerate(chunks, 1):
        watch.count(tokens, float(index))
        arrivals += [float(index)] * tokens
    assert watch.tokens == len(arrivals)
    if arrivals:
        assert watch.ttft_s == arrivals[0]
    assert watch.ttst_s == (arrivals[1] - arrivals[0] if len(arrivals) > 1 else None)
    rest = len(arrivals) - 2
    assert watch.tpot_s == ((arrivals[-1] - arrivals[1]) / rest if rest > 0 else None)


def chunk(**choice: Any) -> bytes:
    return msgspec.json.encode({"choices": [choice]})


def test_a_chat_answer_counts_text_where_there_are_no_ids() -> None:
    stream = AnswerStream(Stopwatch(0.0))
    stream.take(chunk(delta={"role": "assistant", "content": ""}), 1.0)
    stream.take(chunk(delta={"reasoning_content": "hm"}), 2.0)
    stream.take(chunk(delta={"content": " a"}), 3.0)
    stream.take(chunk(delta={}, finish_reason="stop"), 4.0)
    stream.take(b"[DONE]", 5.0)
    answer = stream.answer(5.0, 1, {})
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("hm a", None, "stop")
    assert (answer.completion_tokens, answer.prompt_tokens) == (2, None)
    assert (answer.ttft_s, answer.ttst_s, answer.total_s) == (2.0, 1.0, 5.0)


def test_an_id_without_text_is_a_token() -> None:
    stream = AnswerStream(Stopwatch(0.0))
    stream.take(chunk(text="", token_ids=[5]), 1.0)
    stream.take(chunk(text="é", token_ids=[6]), 2.0)
    stream.take(chunk(text="", token_ids=[], finish_reason="length"), 3.0)
    stream.take(b"[DONE]", 3.0)
    answer = stream.answer(3.0, 1, {})
    assert (answer.token_ids, answer.completion_tokens) == ((5, 6), 2)
    assert (answer.ttft_s, answer.ttst_s) == (1.0, 1.0)


def test_only_a_stream_without_tokens_may_be_tried_again() -> None:
    fresh = AnswerStream(Stopwatch(0.0))
    begun = AnswerStream(Stopwatch(0.0))
    begun.take(chunk(text="a"), 1.0)
    for stream, again in ((fresh, True), (begun, False)):
        with pytest.raises(RequestFailed, match="boom") as caught:
            stream.take(b'{"error": {"message": "boom"}}', 2.0)
        assert (caught.value.failure, caught.value.retry) == (Failure.SERVER, again)
        with pytest.raises(RequestFailed) as caught:
            stream.answer(3.0, 1, {})
        assert (caught.value.failure, caught.value.retry) == (Failure.STREAM, again)


# ---- agents ----------------------------------------------------------------------------------

TRAJECTORY = Trajectory("t", (Round(50, 2, 3.0), Round(10, 0, None), Round(4, 2, None)))


def test_a_token_agent_grows_its_prompt_by_the_given_ids() -> None:
    agent = TokenAgent(TRAJECTORY, 0, seed=1)
    first = agent.ask(0)
    assert first is not None
    agent.take(0, ANSWER)
    assert agent.pause_s(0) == 3.0
    assert agent.ask(1) is None
    assert agent.pause_s(1) == 0.0
    last = agent.ask(2)
    assert last is not None
    prompt = last.body["prompt"]
    assert (first.prompt_tokens, last.prompt_tokens) == (50, 66) == (50, len(prompt))
    assert prompt[:52] == [*first.body["prompt"], 7, 8]
    assert (agent.rounds, agent.requests) == (3, 2)
    assert first.digest != last.digest


def test_prompts_depend_on_seed_and_number_only() -> None:
    def prompt(number: int, seed: int, vocab: int = 8192) -> list[int]:
        ask = TokenAgent(TRAJECTORY, number, seed, vocab).ask(0)
        assert ask is not None
        return list(ask.body["prompt"])

    assert prompt(0, 1) == prompt(0, 1)
    assert len({tuple(prompt(n, s)) for n in range(5) for s in range(5)}) == 25
    assert all(100 <= token < 110 for token in prompt(0, 1, vocab=110))
    with pytest.raises(ValueError, match="vocab must be above 100"):
        prompt(0, 1, vocab=100)
    many = token_agents([TRAJECTORY], 3, seed=1)
    firsts = [ask.digest for agent in many if (ask := agent.ask(0))]
    assert len(set(firsts)) == 3


def test_missing_ids_end_a_conversation_unless_stood_in_for() -> None:
    agent = TokenAgent(TRAJECTORY, 0, seed=1)
    agent.ask(0)
    with pytest.raises(RequestFailed, match="stand-in") as caught:
        agent.take(0, replace(ANSWER, token_ids=None))
    assert caught.value.failure is Failure.NO_IDS
    agent = TokenAgent(TRAJECTORY, 0, seed=1, stand_in=True)
    ask = agent.ask(0)
    assert ask is not None and "return_token_ids" not in ask.body
    agent.take(0, replace(ANSWER, token_ids=None))
    agent.ask(1)
    ask = agent.ask(2)
    assert ask is not None and ask.prompt_tokens == 66


def test_a_chat_agent_sends_a_copy_of_its_messages() -> None:
    agent = ChatAgent(Conversation("c", ("q1", "q2", "q3"), (5, 0, 5)), exact=True)
    first = agent.ask(0)
    agent.take(0, ANSWER)
    assert agent.ask(1) is None
    last = agent.ask(2)
    assert first is not None and last is not None
    assert [m["content"] for m in first.body["messages"]] == ["q1"]
    assert [m["content"] for m in last.body["messages"]] == ["q1", "x", "q2", "q3"]
    assert first.body["ignore_eos"] is True
    with pytest.raises(ValueError, match="c: needs one max_tokens"):
        Conversation("c", ("q",), ())


# ---- figures ---------------------------------------------------------------------------------


def record(agent: int = 0, round: int = 0, **changes: Any) -> RequestRecord:
    base = RequestRecord(
        agent=agent, round=round, name="a", prompt_digest="d", asked_tokens=3, start_s=0.0,
        prompt_tokens=100, completion_tokens=3, token_ids=(1, 2, 3), text="abc", ttft_s=1.0,
        ttst_s=0.2, tpot_s=0.01, total_s=1.3,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def figures(meter: Meter, **changes: Any) -> Any:
    base = {
        "agents": 2, "not_sent": 0, "duration_s": 9.0, "front": None, "aps": None, "seed": 0,
        "interrupted": False,
    }  # fmt: skip
    return meter.figures(**{**base, **changes})


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 201)]
    assert Spread.of(list(reversed(values))) == Spread(100.5, 100.0, 198.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([]) is None
    assert rank([1.0, 2.0], 0.5) == 1.0


def test_figures_by_hand() -> None:
    meter = Meter(4.0, 0.05)
    meter.request(record(ttft_s=2.0, attempts=3, cached_tokens=64))
    meter.request(record(ttft_s=6.0, tpot_s=None, ttst_s=0.4))
    meter.agent_done(10.0)
    meter.agent_done(20.0)
    result = figures(meter, front=FrontTotals(mode="basic", snic={"n": 5}, path={"pe": 5}))
    assert result.jct_s == 15.0
    assert result.ttft_s == Spread(4.0, 2.0, 6.0)
    assert result.ttst_s == pytest.approx(0.3)
    assert result.tpot_s == 0.01
    assert (result.requests, result.failed, result.retries) == (2, 0, 2)
    assert (result.tokens_in, result.tokens_out, result.cached_tokens) == (200, 6, 64)
    assert (result.mode, result.snic, result.path) == ("basic", {"n": 5}, {"pe": 5})
    assert result.slo.met
    assert result.slo.attained == 0.5
    keys = {
        "jct_s", "ttft_s", "ttst_s", "tpot_s", "requests", "failed", "tokens_in", "tokens_out",
        "snic", "path", "mode",
    }  # fmt: skip
    assert keys <= result.to_json().keys()
    assert set(result.to_json()["ttft_s"]) == {"mean", "p50", "p99"}


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"ttft_s": 4.01}, False),
        ({"tpot_s": 0.051}, False),
        ({"failure": "server"}, False),
    ],
)
def test_the_verdict(change: dict[str, Any], met: bool) -> None:
    meter = Meter(4.0, 0.05)
    meter.request(record(**change))
    assert figures(meter).slo.met is met
    assert figures(meter).slo.attained == float(met)
    assert figures(meter, interrupted=True).slo.met is False


def test_a_failed_request_adds_no_tokens_and_no_times() -> None:
    meter = Meter(4.0, 0.05)
    meter.request(record(failure="length", error="short"))
    result = figures(meter)
    assert (result.tokens_in, result.tokens_out, result.ttft_s, result.jct_s) == (0, 0, None, None)
    meter.request(record(round=1, failure="server", error="later"))
    assert result.failures == {"length": 1}
    assert figures(meter).first_error == result.first_error == "agent 0 round 0: short"


def test_a_nodes_share_is_a_difference() -> None:
    before = FrontTotals(mode="basic", snic={"a": 10}, path={"pe": 10, "de": 0})
    after = FrontTotals(mode="dualpath", snic={"a": 15, "b": 2}, path={"pe": 12, "de": 5})
    share = FrontTotals(mode="dualpath", snic={"a": 5, "b": 2}, path={"pe": 2, "de": 5})
    assert after.since(before) == share
    assert before.since(after) is None


# ---- comparison ------------------------------------------------------------------------------


def test_equal_runs_in_any_order() -> None:
    runs = [record(0, 0), record(0, 1), record(1, 0)]
    outcome = compare(runs, reversed(runs))
    assert outcome.equal
    assert (outcome.requests, outcome.tokens, outcome.different) == (3, 9, 0)
    # Times differ between any two runs and mean nothing here.
    assert compare(runs, [msgspec.structs.replace(r, ttft_s=9.0, start_s=3.0) for r in runs]).equal


@pytest.mark.parametrize(
    ("change", "what", "token"),
    [
        ({"token_ids": (1, 9, 3)}, "token 1: 2 / 9", 1),
        ({"token_ids": (1, 2)}, "lengths differ: 3 / 2", 2),
        ({"token_ids": None, "text": "abd"}, "texts differ", None),
        ({"prompt_digest": "e"}, "prompts differ", None),
        ({"failure": "server", "error": "HTTP 500"}, "failed in the second run: HTTP 500", None),
    ],
)
def test_the_first_difference(change: dict[str, Any], what: str, token: int | None) -> None:
    left = [record(0, 0), record(0, 1), record(1, 0)]
    right = [record(0, 0), record(1, 0, **change), record(0, 1, **change)]
    outcome = compare(left, right)
    assert not outcome.equal
    assert outcome.different == 2
    assert outcome.first is not None
    assert (outcome.first.agent, outcome.first.round, outcome.first.token) == (0, 1, token)
    assert what in str(outcome.first)


def test_missing_requests_and_nothing_at_all() -> None:
    assert not compare([], []).equal
    outcome = compare([record(0, 0)], [record(0, 0), record(0, 1)])
    assert str(outcome.first) == "agent 0 round 1: only the second run has it"
    with pytest.raises(ValueError, match="agent 0 round 0 is recorded twice"):
        compare([record(), record()], [])
    by_text = compare([record(token_ids=None)], [record()])
    assert by_text.equal
    assert (by_text.by_text, by_text.tokens) == (1, 0)


def test_record_files(tmp_path: Path) -> None:
    records = [
        record(0, 0),
        record(0, 1, failure="server", error="é", headers={"x-dualpath-a": "b"}),
    ]
    with RecordWriter(tmp_path / "run") as writer:
        for item in records:
            writer.write(item)
    assert list(read_records(tmp_path / "run")) == records
    with pytest.raises(RecordError, match="exists already"):
        RecordWriter(tmp_path / "run")
    path = tmp_path / "run" / "requests.jsonl"
    with path.open("ab") as file:
        file.write(b'{"agent": 1')
    with pytest.raises(RecordError, match=r"requests\.jsonl:3: not a record"):
        list(read_records(path))
    with pytest.raises(RecordError, match="cannot be read"):
        list(read_records(tmp_path / "absent.jsonl"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"url": "localhost:8000"}, "url"),
        ({"aps": 0.0}, "aps"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"slo_ttft_s": -1.0}, "slo_ttft_s"),
        ({"retries": -1}, "retries"),
        ({"latency_scale": float("nan")}, "latency_scale"),
    ],
)
def test_options_are_checked(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ReplayOptions(**{"url": "http://x", **change})
