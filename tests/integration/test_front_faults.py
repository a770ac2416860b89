"""Engines die, hang and refuse; clients go away. Every request ends, nothing stays held."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_model import chat_tokens, generate, text_of, tokens_of
from front_kit import PATIENCE_S, FakeCluster, make_config, running_cluster, running_front

from dualpath.config import Role
from dualpath.control.messages import Allocated, Closed, Opened, PrefillDone, TurnDurable

pytestmark = pytest.mark.integration

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
IDS = tokens_of("a prompt that fills a few blocks")
BODY = {"model": "fake", "prompt": IDS, "max_tokens": 5}
EXPECTED = text_of(generate(IDS, 5))
STAGES = [
    ("pe0", "open"), ("pe0", "prefill"), ("pe0", "prefill_done"),
    ("de0", "allocate"), ("de0", "open"), ("de0", "decode"),
]  # fmt: skip


def holds(cluster: FakeCluster, engine: str, point: str) -> Callable[[], bool]:
    return lambda: f"{engine} holds {point}" in cluster.shared.events


def role_of(name: str) -> Role:
    return Role.PREFILL if name.startswith("pe") else Role.DECODE


# ---- engines that die ------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "point"), STAGES)
async def test_a_killed_engine_is_replaced(tmp_path: Path, victim: str, point: str) -> None:
    """Killed before its answer, at any stage: the request succeeds on another engine, and a
    process that takes the dead one's place is used again."""
    async with running_cluster(make_config(tmp_path, prefill=2, decode=2)) as cluster:
        role = role_of(victim)
        cluster.engines[victim].hold(point)
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, victim, point))
        spare = await cluster.add(role, 1)
        await cluster.engines[victim].kill()
        status, answer, headers = await request
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        assert headers["x-dualpath-attempt"] == "1"
        other = cluster.de if role is Role.PREFILL else cluster.pe
        await cluster.until(lambda: victim not in other.peers)
        await spare.kill()
        await cluster.add(role, 0)
        status, answer, headers = await cluster.post(TEXT, BODY)
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        assert cluster.engines[victim].bodies, "the new process was not used"
        await cluster.idle()


@pytest.mark.parametrize("victim", ["pe0", "de0"])
async def test_a_request_waits_for_the_only_engine(tmp_path: Path, victim: str) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        point = "prefill" if victim == "pe0" else "open"
        cluster.engines[victim].hold(point)
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, victim, point))
        await cluster.engines[victim].kill()
        await cluster.add(role_of(victim), 0)
        status, answer, _ = await request
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        await cluster.idle()


async def test_without_engines_a_request_ends_in_time(tmp_path: Path) -> None:
    config = make_config(tmp_path, timeouts={"admission": "100ms"})
    async with running_front(config) as cluster:
        status, answer, _ = await cluster.post(TEXT, BODY)
        assert status == 503
        assert answer["error"]["code"] == 503
        await cluster.add(Role.DECODE, 0)
        status, answer, _ = await cluster.post(TEXT, BODY)
        assert status == 503
        await cluster.idle()


async def test_killed_in_mid_answer(tmp_path: Path) -> None:
    """Part of the DE's answer is out: the stream ends with an error event, then ``[DONE]``."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.de.break_stream_after = 2
        status, events, _ = await cluster.stream(TEXT, BODY)
        assert status == 200
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == 503
        assert "".join(e["choices"][0]["text"] for e in events[:-2]) == EXPECTED[:3]
        cluster.de.break_stream_after = None
        (record,) = (await cluster.get("/debug/requests"))["requests"]
        assert record["outcome"] == "failed"
        await cluster.idle()


async def test_killed_after_the_first_token(tmp_path: Path) -> None:
    """Only the PE's token is out: the stream goes on with another DE, from that very token."""
    async with running_cluster(make_config(tmp_path, decode=2)) as cluster:
        cluster.de.hold("decode")
        request = asyncio.create_task(cluster.stream(TEXT, {**BODY, "return_token_ids": True}))
        await cluster.until(holds(cluster, "de0", "decode"))
        await cluster.add(Role.DECODE, 1)
        await cluster.de.kill()
        status, events, _ = await request
        assert status == 200
        got = [t for event in events[:-1] for t in event["choices"][0]["token_ids"]]
        assert got == generate(IDS, 5)
        assert len({event["id"] for event in events[:-1]}) == 1
        await cluster.idle()


async def test_killed_while_blocks_become_durable(tmp_path: Path) -> None:
    """The answer was complete, so the client gets all of it."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.de.hold("durable")
        request = asyncio.create_task(cluster.stream(TEXT, BODY))
        await cluster.until(holds(cluster, "de0", "durable"))
        await cluster.de.drop_control()
        status, events, _ = await request
        assert status == 200
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == EXPECTED
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_the_answer_ends_when_its_blocks_are_durable(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.de.hold("durable")
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, "de0", "durable"))
        await asyncio.sleep(0.05)
        assert not request.done()
        cluster.de.release("durable")
        assert (await request)[0] == 200
        cluster.de.hold("durable")  # never comes: sent anyway, and counted
        assert (await cluster.post(TEXT, BODY))[0] == 200
        async with cluster.http.get(cluster.url + "/metrics") as response:
            assert "dualpath_durable_timeouts_total 1.0" in await response.text()
        cluster.de.release("durable")
        await cluster.idle()


async def test_tokens_do_not_wait_for_the_store(tmp_path: Path) -> None:
    """Every chunk of a stream is out while the turn's blocks are being stored: not ``[DONE]``."""
    for options, chunks in (({}, 5), ({"stream_options": {"include_usage": True}}, 6)):
        async with running_cluster(make_config(tmp_path)) as cluster:
            cluster.de.hold("durable")
            async with cluster.http.post(
                cluster.url + TEXT, json={**BODY, "stream": True, **options}
            ) as response:
                raw = b""
                while raw.count(b"\n\n") < chunks:
                    raw += await asyncio.wait_for(response.content.readany(), 3)
                assert b"[DONE]" not in raw
                await cluster.until(holds(cluster, "de0", "durable"))
                rest = asyncio.create_task(response.content.read())
                await asyncio.sleep(0.05)
                assert not rest.done()
                cluster.de.release("durable")
                assert await rest == b"data: [DONE]\n\n"
            events = [json.loads(block[6:]) for block in raw.split(b"\n\n")[:-1]]
            choices = [choice for event in events for choice in event["choices"]]
            assert "".join(choice["text"] for choice in choices) == EXPECTED
            assert choices[-1]["finish_reason"] == "length"
            assert ("usage" in events[-1] and not events[-1]["choices"]) == bool(options)
            await cluster.idle()


async def test_who_leaves_with_all_tokens_has_not_given_up(tmp_path: Path) -> None:
    """The blocks of such a turn are stored, and the next turn hits them."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.de.hold("durable")
        body = {**BODY, "prompt": [*IDS, *IDS, *IDS], "stream": True}
        await _send_and_leave(cluster, body, holds(cluster, "de0", "durable"), path=TEXT)
        while not (records := (await cluster.get("/debug/requests"))["requests"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert records[0]["outcome"] == "ok"
        assert "de0 close 0" not in cluster.shared.events
        cluster.de.release("durable")
        await cluster.idle()
        _, answer, headers = await cluster.post(TEXT, {**BODY, "prompt": body["prompt"]})
        assert int(headers["x-dualpath-hit-tokens"]) > 0
        assert answer["choices"][0]["text"]
        await cluster.idle()


async def test_a_lost_connection_of_a_living_engine(tmp_path: Path) -> None:
    """A PE that lives may still be writing: nobody is told that it is gone, and the DE's slots
    stay taken until it has joined again."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.pe.hold("prefill")
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, "pe0", "prefill"))
        await cluster.pe.drop_control()
        await asyncio.sleep(0.2)
        assert "de0 close 0" not in cluster.shared.events
        assert "de0 told pe0 gone" not in cluster.shared.events
        cluster.pe.release("prefill")
        await cluster.pe.rejoin()
        status, answer, _ = await request
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        await cluster.until(lambda: "de0 close 0" in cluster.shared.events)
        assert "de0 told pe0 gone" not in cluster.shared.events
        await cluster.idle()


async def test_a_de_that_connects_again_is_told_when_the_pe_is_over(tmp_path: Path) -> None:
    """Its PE may still be writing for a session that the DE lost: it is not introduced as quiet,
    and the end comes as the session's ``Close``, on the new connection."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.pe.hold("prefill")
        cluster.pe.hold("close")
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, "pe0", "prefill"))
        await cluster.de.drop_control()
        await cluster.de.rejoin()
        await cluster.until(lambda: "de0 told pe0 may still write" in cluster.shared.events)
        await cluster.until(holds(cluster, "pe0", "close"))
        assert "de0 close 0" not in cluster.shared.events
        cluster.pe.release("prefill")
        cluster.pe.release("close")
        await cluster.until(lambda: "de0 close 0" in cluster.shared.events)
        status, answer, _ = await request
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        await cluster.idle()
        # With nothing left, the next time there is nothing to wait for.
        cluster.shared.events.clear()
        await cluster.de.drop_control()
        await cluster.de.rejoin()
        await cluster.until(lambda: "pe0" in cluster.de.peers)
        assert (await cluster.post(TEXT, BODY))[0] == 200
        assert "de0 told pe0 may still write" not in cluster.shared.events
        await cluster.idle()


# ---- engines that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["pe0", "de0"])
async def test_a_session_that_cannot_open_is_tried_again(tmp_path: Path, victim: str) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.engines[victim].fail_open = "no room"
        status, answer, headers = await cluster.post(TEXT, BODY)
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        assert headers["x-dualpath-attempt"] == "1"
        cluster.engines[victim].fail_open = "the prompt is larger than the buffer"
        cluster.engines[victim].fail_open_permanent = True
        status, answer, _ = await cluster.post(TEXT, BODY)
        assert status == 400
        assert "larger than the buffer" in answer["error"]["message"]
        await cluster.idle()


async def test_a_failed_prefill_is_tried_again(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.pe.fail_prefill = "a transfer timed out"
        status, answer, headers = await cluster.post(TEXT, BODY)
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        assert headers["x-dualpath-attempt"] == "1"
        await cluster.idle()


@pytest.mark.parametrize("victim", ["pe0", "de0"])
async def test_server_errors_are_tried_again_then_told(tmp_path: Path, victim: str) -> None:
    async with running_cluster(make_config(tmp_path, front={"max_retries": 1})) as cluster:
        engine = cluster.engines[victim]
        engine.http_status[TEXT] = 500
        status, answer, _ = await cluster.post(TEXT, BODY)
        assert (status, answer["error"]["code"]) == (503, 503)
        assert len([path for path, _ in engine.bodies if path == TEXT]) == 2
        engine.http_status.clear()
        assert (await cluster.post(TEXT, BODY))[0] == 200
        await cluster.idle()


@pytest.mark.parametrize(("victim", "path"), [("pe0", TEXT), ("de0", CHAT), ("de0", "/tokenize")])
async def test_refusals_pass_through(tmp_path: Path, victim: str, path: str) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.engines[victim].http_status[path] = 422
        status, answer, _ = await cluster.chat("hi", seed=1)
        assert status == 422
        assert answer == {"error": {"message": "told to", "type": "T", "param": "p", "code": 422}}
        await cluster.idle()


@pytest.mark.parametrize(("victim", "point"), STAGES)
async def test_the_deadline_ends_a_request(tmp_path: Path, victim: str, point: str) -> None:
    config = make_config(tmp_path, timeouts={"request": "300ms"})
    async with running_cluster(config) as cluster:
        cluster.engines[victim].hold(point)
        status, answer, _ = await cluster.post(TEXT, BODY)
        assert (status, answer["error"]["code"]) == (504, 504)
        cluster.engines[victim].release(point)
        assert (await cluster.post(TEXT, BODY))[0] == 200
        await cluster.idle()


async def test_a_silent_engine_gets_no_new_work(tmp_path: Path) -> None:
    config = make_config(tmp_path, decode=2, scheduler={"report_timeout": "300ms"})
    async with running_cluster(config) as cluster:
        await cluster.add(Role.DECODE, 1)
        cluster.de.silent = True
        await cluster.usable("de0", False)
        for _ in range(4):
            assert (await cluster.post(TEXT, BODY))[0] == 200
        assert cluster.de.bodies == []
        cluster.de.silent = False
        await cluster.usable("de0", True)
        await cluster.engines["de1"].kill()
        assert (await cluster.post(TEXT, BODY))[0] == 200
        assert len(cluster.de.bodies) == 1
        await cluster.idle()


@pytest.mark.parametrize(("victim", "point"), STAGES)
async def test_a_stopped_engine_does_not_hold_requests(
    tmp_path: Path, victim: str, point: str
) -> None:
    """As SIGSTOP: its connections stay. The request succeeds elsewhere; what the engine could
    still write to is not given back before it wakes and says so."""
    config = make_config(
        tmp_path, prefill=2, decode=2,
        scheduler={"report_timeout": "300ms"}, timeouts={"layer": "200ms"},
    )  # fmt: skip
    async with running_cluster(config) as cluster:
        stopped = cluster.engines[victim]
        stopped.hold(point)
        stopped.hold("close")
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, victim, point))
        await cluster.add(role_of(victim), 1)
        stopped.silent = True
        status, answer, headers = await request
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        assert headers["x-dualpath-attempt"] == "1"
        if victim == "pe0":
            assert "de0 close 0" not in cluster.shared.events
        assert f"{victim} close 0" in cluster.shared.events
        stopped.silent = False
        stopped.release("close")
        await cluster.idle()
        stopped.release(point)


async def test_a_failing_engine_is_not_ready(tmp_path: Path) -> None:
    from dualpath.control.messages import Failing

    async with running_cluster(make_config(tmp_path)) as cluster:
        assert await cluster.status("/ready") == 200
        cluster.de.send(Failing(reason="a thread died"))
        async with asyncio.timeout(PATIENCE_S):
            while await cluster.status("/ready") != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await cluster.status("/health") == 200


async def test_late_answers_change_nothing(tmp_path: Path) -> None:
    """Words about closed sessions, unknown ones and other attempts are ignored and counted."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.de.hold("decode")
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(holds(cluster, "de0", "decode"))
        ((rid, attempt),) = cluster.de.sessions
        for engine in (cluster.pe, cluster.de):
            for name in ((rid, attempt + 1), ("nobody", 0)):
                engine.send(Allocated(rid=name[0], attempt=name[1], slots=[9]))
                engine.send(Opened(rid=name[0], attempt=name[1], error="x", permanent=True))
                engine.send(PrefillDone(rid=name[0], attempt=name[1], error="x"))
                engine.send(TurnDurable(rid=name[0], attempt=name[1]))
                engine.send(Closed(rid=name[0], attempt=name[1]))
        cluster.de.send(Opened(rid=rid, attempt=attempt, error="again"))
        await asyncio.sleep(0.05)
        cluster.de.release("decode")
        status, answer, headers = await request
        assert (status, answer["choices"][0]["text"]) == (200, EXPECTED)
        assert headers["x-dualpath-attempt"] == "0"
        async with cluster.http.get(cluster.url + "/metrics") as response:
            assert (
                'dualpath_late_messages_total{message="TurnDurable"} 4.0' in await response.text()
            )
        await cluster.idle()


# ---- clients that go away -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "point", "stream"),
    [
        *((victim, point, False) for victim, point in STAGES),
        ("de0", "tokenize", False), ("de0", "durable", False),
        ("pe0", "prefill_done", True), ("de0", "decode", True),
        ("de0", "token", True), ("de0", "durable", True),
    ],
)  # fmt: skip
async def test_a_client_goes_away(tmp_path: Path, victim: str, point: str, stream: bool) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": stream,
    }  # fmt: skip
    async with running_cluster(make_config(tmp_path)) as cluster:
        engine = cluster.engines[victim]
        engine.hold(point)
        await _send_and_leave(cluster, body, holds(cluster, victim, point))
        await cluster.idle()  # while the engine still hangs: nothing waits for it
        if point in ("prefill", "decode", "token"):
            assert engine.aborted == 1, "the engine was not told to stop"
        engine.release(point)
        (record,) = (await cluster.get("/debug/requests"))["requests"]
        # With the blocks still to be stored, the client of a stream has had all its tokens.
        complete = stream and point == "durable"
        assert record["outcome"] == ("ok" if complete else "cancelled")
        status, answer, _ = await cluster.chat("hello", max_tokens=5)
        ids = chat_tokens([{"role": "user", "content": "hello"}])
        assert (status, answer["choices"][0]["message"]["content"]) == (
            200, text_of(generate(ids, 5)),
        )  # fmt: skip
        await cluster.idle()


async def test_a_client_goes_away_while_waiting_for_engines(tmp_path: Path) -> None:
    async with running_front(make_config(tmp_path)) as cluster:
        await cluster.add(Role.DECODE, 0)
        body = {"prompt": IDS, "max_tokens": 2}

        async def waits() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not (await cluster.get("/debug/state"))["scheduler"]["waiting_prefill"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        await _send_and_leave(cluster, body, None, path=TEXT, until=waits())
        await cluster.idle()


async def _send_and_leave(
    cluster: FakeCluster,
    body: dict[str, Any],
    when: Callable[[], bool] | None,
    *,
    path: str = CHAT,
    until: Any = None,
) -> None:
    """A raw connection that sends a request and is closed when ``when`` holds."""
    host, port = cluster.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
    await writer.drain()
    if when is not None:
        await cluster.until(when)
    else:
        await until
    writer.transport.abort()


async def test_a_slow_close_is_waited_for(tmp_path: Path) -> None:
    """The DE is told to close only after the PE has said that it is done, however long it takes
    (``FakeEngine`` reports the opposite as a fault)."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.pe.hold("close")
        assert (await cluster.post(TEXT, BODY))[0] == 200
        await asyncio.sleep(0.7)  # longer than the front calls slow
        assert "pe0 close 0" in cluster.shared.events
        assert "de0 close 0" not in cluster.shared.events
        async with cluster.http.get(cluster.url + "/metrics") as response:
            assert "dualpath_close_overdue_total 1.0" in await response.text()
        cluster.pe.release("close")
        await cluster.idle()
        assert "de0 close 0" in cluster.shared.events


async def test_many_at_once_with_engines_dying(tmp_path: Path) -> None:
    """Thirty requests, a PE and a DE killed and replaced under them: every answer is right."""
    config = make_config(tmp_path, prefill=2, decode=2, front={"max_retries": 5})
    async with running_cluster(config) as cluster:
        await cluster.add(Role.PREFILL, 1)
        await cluster.add(Role.DECODE, 1)
        prompts = [tokens_of(f"{'shared prefix ' * (n % 4)}and its own {n}") for n in range(30)]
        requests = [
            asyncio.create_task(
                cluster.post(TEXT, {"prompt": prompt, "max_tokens": 8, "seed": n % 2 or None})
            )
            for n, prompt in enumerate(prompts)
        ]
        for victim, role in (("pe0", Role.PREFILL), ("de1", Role.DECODE)):
            await asyncio.sleep(0.02)
            rank = int(victim[2:])
            await cluster.engines[victim].kill()
            await cluster.add(role, rank)
        for prompt, request in zip(prompts, requests, strict=True):
            status, answer, _ = await request
            assert status == 200
            assert answer["choices"][0]["text"] == text_of(generate(prompt, 8))
        await cluster.idle()


async def test_the_front_ends_in_order(tmp_path: Path) -> None:
    """Stopping lets what is under way finish, and engines see their connection end."""
    config = make_config(tmp_path)
    async with running_cluster(config) as cluster:
        cluster.de.hold("token")
        request = asyncio.create_task(cluster.stream(TEXT, BODY))
        await cluster.until(holds(cluster, "de0", "token"))
        engine: FakeEngine = cluster.de
        asyncio.get_running_loop().call_later(0.2, engine.release, "token")
        cluster.stop.set()
        status, events, _ = await request
        assert status == 200
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == EXPECTED
        await asyncio.wait_for(cluster.front, 5)
        with (
            pytest.raises(OSError),
            socket.create_connection(("127.0.0.1", config.front.control_port), timeout=1),
        ):
            pass
