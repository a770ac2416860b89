"""Converters, on small files written as the public data sets write theirs."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.workload.blocks import prompt_blocks
from dualpath.workload.formats.convert import Conversion, Format, Options
from dualpath.workload.formats.documents import documents
from dualpath.workload.trace import Round, TraceError, Trajectory

pytestmark = pytest.mark.unit


def write_lines(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def convert(path: Path, **options: Any) -> tuple[list[Trajectory], Conversion]:
    conversion = Conversion(path, Options(**options))
    return list(conversion), conversion


# --- kv-cache-tester -----------------------------------------------------------------------------


def request(t: float, prompt: int, out: int, ids: list[int], **more: Any) -> dict[str, Any]:
    plain = {
        "t": t, "type": "s", "model": "claude", "in": prompt, "out": out, "hash_ids": ids,
        "input_types": ["text"], "output_types": ["text"], "stop": "",
    }  # fmt: skip
    return plain | more


def session(**more: Any) -> dict[str, Any]:
    """A pair of copies, an ordinary turn, a shrunken answer, then a compacted context."""
    return {
        "id": "trace_0002", "models": ["claude"], "block_size": 64, "tool_tokens": 100,
        "system_tokens": 28,
        "requests": [
            request(0.0, 300, 70, [1, 2, 3, 4, 5]),
            request(11.0, 300, 24, [1, 2, 3, 4, 5], type="n", stop="tool_use"),
            request(16.0, 400, 18, [1, 2, 3, 4, 6, 7, 8]),
            request(20.0, 410, 25, [1, 2, 3, 4, 6, 7, 9]),
            request(30.0, 200, 0, [1, 2, 10, 11]),
        ],
    } | more  # fmt: skip


def test_kv_cache_tester_session(tmp_path: Path) -> None:
    path = tmp_path / "trace_0002.json"
    path.write_text(json.dumps(session(), indent=2))
    found, conversion = convert(path)
    assert conversion.form is Format.KV_CACHE_TESTER
    first, second = found
    assert (first.id, second.id) == ("trace_0002.0", "trace_0002.1")
    # The second copy of the first request counts; 410 is less than 400 + 18, so append 1.
    assert first.rounds == (Round(300, 24, 5.0), Round(76, 18, 4.0), Round(1, 25, None))
    assert second.rounds == (Round(200, 1, None),)  # asked for, though nothing came
    assert first.extra["kind"] == "main"
    assert (first.extra["start"], second.extra["start"]) == ("first", "reset")
    assert first.extra["shared_prefix"] == 128
    assert first.extra["block"] == 64
    assert first.extra["blocks"] == [[0, [[1, 5]]], [4, [[6, 3]]], [6, [[9, 1]]]]
    assert conversion.clamped == 1


def test_kv_cache_tester_agents_below_and_measured_times(tmp_path: Path) -> None:
    agent = {
        "t": 6.0, "type": "nested", "agent_id": "a1",
        "requests": [
            request(6.0, 64, 9, [1], api_time=2.0),
            request(9.5, 128, 9, [1, 20], api_time=1.0, think_time=0.25),
        ],
    }  # fmt: skip
    main = [
        request(0.0, 64, 10, [1], api_time=2.0),
        agent,
        request(12.0, 128, 10, [1, 21], api_time=3.0),
        request(20.0, 192, 10, [1, 21, 22], think_time=4.5),
    ]
    path = write_lines(tmp_path / "one.jsonl", [session(requests=main, hash_id_scope="global")])
    found, _ = convert(path)
    assert [item.id for item in found] == ["trace_0002.0", "trace_0002.sa0.0"]
    assert found[1].extra["kind"] == "sub"
    # Without think_time what is left after the server's own time; with it, as measured.
    assert [item.tool_latency_s for item in found[0].rounds] == [10.0, 4.5, None]
    assert [item.tool_latency_s for item in found[1].rounds] == [0.25, None]
    assert found[1].extra["blocks"] == [[0, [[1, 1]]], [1, [[20, 1]]]]  # global: not shifted


def test_kv_cache_tester_sessions_that_number_their_own_blocks(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"trace_{number}.json").write_text(json.dumps(session(id=f"s{number}")))
    found, _ = convert(tmp_path)
    ids = [set().union(*prompt_blocks(item)) for item in found]
    assert ids[0] & ids[1]  # segments of one session share
    assert not (ids[0] | ids[1]) & (ids[2] | ids[3])
    bare, _ = convert(tmp_path, blocks=False)
    assert not any("blocks" in item.extra for item in bare)
    long, conversion = convert(tmp_path, min_rounds=2)
    assert [item.id for item in long] == ["s0.0", "s1.0"]
    assert conversion.dropped == 2


# --- Mooncake ------------------------------------------------------------------------------------


def mooncake(at_ms: int, prompt: int, out: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": out, "hash_ids": ids}


MOONCAKE = [
    mooncake(0, 1100, 100, [0, 1, 2]),
    mooncake(0, 1500, 50, [0, 3, 4]),
    mooncake(3000, 600, 20, [0, 5]),  # its only full block is everybody's
    mooncake(5000, 1300, 10, [0, 1, 6]),  # goes on with the first
    mooncake(6000, 700, 20, [0, 7]),  # goes on with nobody
    mooncake(9000, 1305, 30, [0, 1, 8]),  # shorter than prompt and answer: append 1
    mooncake(9000, 2100, 10, [0, 3, 9, 10, 11]),
]


def test_mooncake_requests_are_joined(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "conversation_trace.jsonl", MOONCAKE)
    found, conversion = convert(path)
    assert conversion.form is Format.MOONCAKE
    by_name = {item.id: item for item in found}
    assert sorted(by_name) == ["mc00000", "mc00001", "mc00002", "mc00004"]
    joined = by_name["mc00000"]
    assert joined.rounds == (Round(1100, 100, 5.0), Round(100, 10, 4.0), Round(1, 30, None))
    assert joined.extra == {
        "t0_ms": 0.0, "block": 512, "blocks": [[0, [[0, 3]]], [2, [[6, 1]]], [2, [[8, 1]]]],
    }  # fmt: skip
    assert by_name["mc00001"].rounds == (Round(1500, 50, 9.0), Round(550, 10, None))
    assert len(by_name["mc00002"].rounds) == len(by_name["mc00004"].rounds) == 1
    assert conversion.clamped == 1
    assert [item.id for item in convert(path, min_rounds=2)[0]] == ["mc00000", "mc00001"]


def test_mooncake_idle_conversations_end(tmp_path: Path) -> None:
    late = mooncake(4_000_000, 1400, 10, [0, 1, 12])
    path = write_lines(tmp_path / "log.jsonl", [*MOONCAKE, late])
    found, _ = convert(path)
    assert [item.id for item in found][-1] == "mc00007"
    assert len(found) == 5
    patient, _ = convert(path, idle_s=5000)
    assert {item.id: len(item.rounds) for item in patient}["mc00000"] == 4


def test_mooncake_out_of_order(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.jsonl", [mooncake(5, 10, 1, [0]), mooncake(4, 10, 1, [0])])
    with pytest.raises(TraceError, match=r"log\.jsonl: document 2: timestamp: requests must be"):
        convert(path)


def test_a_request_log_needs_no_more_memory_when_it_is_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath.workload.formats.documents._CHUNK_BYTES", 4096)

    def log(count: int) -> Iterator[str]:
        for n in range(count):  # a conversation of two requests every 20 s
            ids = [3 * n + at for at in range(3)]
            yield json.dumps(mooncake(20_000 * n, 1100, 10, ids)) + "\n"
            yield json.dumps(mooncake(20_000 * n + 9_000, 1300, 10, [*ids[:2], ids[2]])) + "\n"

    peaks = []
    for count in (300, 3000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(log(count)))
        tracemalloc.start()
        assert sum(1 for _ in Conversion(path, Options(idle_s=600))) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


# --- Bailian -------------------------------------------------------------------------------------


def bailian(chat: int, parent: int, at_s: float, prompt: int, out: int) -> dict[str, Any]:
    return {
        "chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "input_length": prompt,
        "output_length": out, "type": "text", "turn": 1, "hash_ids": [chat],
    }  # fmt: skip


def test_bailian_requests_name_their_parents(tmp_path: Path) -> None:
    rows = [
        bailian(10, -1, 0.0, 100, 20),
        bailian(11, -1, 1.0, 50, 5),
        bailian(12, 10, 8.5, 150, 20),
        bailian(13, 12, 10.0, 171, 3),
        bailian(14, 99, 11.0, 40, 3),
    ]
    found, conversion = convert(write_lines(tmp_path / "qwen_traceA_blksz_16.jsonl", rows))
    assert conversion.form is Format.BAILIAN
    by_name = {item.id: item.rounds for item in found}
    assert by_name == {
        "bailian-10": (Round(100, 20, 8.5), Round(30, 20, 1.5), Round(1, 3, None)),
        "bailian-11": (Round(50, 5, None),),
        "bailian-14": (Round(40, 3, None),),
    }
    assert found[0].extra["block"] == 16


# --- texts ---------------------------------------------------------------------------------------


def test_sharegpt(tmp_path: Path) -> None:
    items = [
        {
            "id": "QWJhYvA_0",
            "conversations": [
                {"from": "human", "value": "x" * 40},
                {"from": "gpt", "value": "y" * 10},
                {"from": "human", "value": "x" * 8},
                {"from": "gpt", "value": ""},
                {"from": "human", "value": "thanks"},
            ],
        },
        {"id": "empty", "conversations": []},
        {"id": "greets", "conversations": [
            {"from": "gpt", "value": "12345678"}, {"from": "human", "value": "1234"},
            {"from": "gpt", "value": "1234"},
        ]},
    ]  # fmt: skip
    path = tmp_path / "ShareGPT_V3.json"
    path.write_text(json.dumps(items))
    found, conversion = convert(path)
    assert conversion.form is Format.SHAREGPT
    assert found[0].id == "QWJhYvA_0"
    assert found[0].rounds == (Round(10, 3, None), Round(2, 1, None))
    assert found[0].extra == {"estimated": True}
    assert found[1].rounds == (Round(3, 1, None),)
    assert conversion.dropped == 1
    assert convert(path, chars_per_token=2)[0][0].rounds[0] == Round(20, 5, None)


def test_openai_messages(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    log = {
        "messages": [
            {"role": "system", "content": "s" * 400},
            {"role": "user", "content": [{"type": "text", "text": "u" * 36}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "r" * 80},
            {"role": "assistant", "content": "a" * 12},
        ]
    }
    found, conversion = convert(write_lines(tmp_path / "log.jsonl", [log, log]))
    assert conversion.form is Format.OPENAI
    assert [item.id for item in found] == ["chat000000", "chat000001"]
    first, second = found[0].rounds
    assert first.append_tokens == (400 + 4 + 36) // 4  # the part's type counts as text too
    assert first.gen_tokens == 4  # c1, function, ls, {}: 14 characters
    assert second == Round(20, 3, None)


# --- documents -----------------------------------------------------------------------------------

TEXT = st.text(max_size=12)
OBJECTS = st.lists(
    st.dictionaries(TEXT, st.none() | TEXT | st.lists(st.dictionaries(TEXT, TEXT, max_size=2)),
                    max_size=3),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(deadline=None)
@given(OBJECTS, st.sampled_from(["lines", "array", "pretty"]), st.integers(1, 30))
def test_documents_are_cut_where_json_says(
    tmp_path_factory: pytest.TempPathFactory, objects: list[Any], shape: str, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("documents") / "file.json"
    text = {
        "lines": "\n".join(json.dumps(item, ensure_ascii=False) for item in objects) + "\n",
        "array": json.dumps(objects),
        "pretty": json.dumps(objects, indent=3, ensure_ascii=False),
    }[shape]
    path.write_bytes(gzip.compress(text.encode()) if chunk % 2 else text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualpath.workload.formats.documents._CHUNK_BYTES", chunk)
        assert [json.loads(document) for _, document in documents(path)] == objects


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no JSON objects"),
        ("hello", "found b'hello'"),
        ('{"id": "a"', "document 1: ends in the middle"),
        ('[{"id": "a", "rounds": [[1, 1, null]]}', "document 2: ends in the middle"),
        ('["text"]', "a JSON object is wanted"),
        ('{"id": "a", "rounds": [[1, 1, null]]} ]', "a JSON object is wanted"),
        ('{"other": 1}', "document 1: format: not recognised by its keys ['other']"),
        ('{"id": "s", "requests": [{"type": "s", "in": -4}]}', "$.requests[0].in"),
        ('{"id": "s", "requests": [{"type": "s", "in": 4, "think_time": -1}]}', "think_time"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"messages": [{"content": "x"}]}', "messages[0]: has neither role nor from"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no trajectories are left of 1"),
        ('{"id": "a", "rounds": [[1, 1, -2]]}', "rounds[0][2]"),
    ],
)
def test_wrong_files_are_one_line_with_the_place(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        convert(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert named in message
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent: cannot be read: No such file"):
        convert(tmp_path / "absent")
    with pytest.raises(TraceError, match=r"holds no \.json"):
        convert(tmp_path)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(json.dumps(session()).encode())[:-20])
    with pytest.raises(TraceError, match="gzip stream cut or damaged"):
        convert(cut)
