"""Engines that speak the real control protocol and vLLM's HTTP answers, and compute nothing.

They check the front's side of the protocol: a message out of order is a failure that
``FakeCluster.check`` reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from fake_answers import Render, error_answer, refuse_malformed, send_event
from fake_model import EOS, chat_tokens, generate, text_of, tokens_of

from dualpath.blocks import chain_keys, extend_keys
from dualpath.config import Role, engine_name
from dualpath.control.channel import Channel, connect
from dualpath.control.host import host_id
from dualpath.control.messages import (
    PROTOCOL_VERSION,
    Allocated,
    BlockRef,
    BufferInfo,
    Close,
    Closed,
    Dropped,
    EngineStats,
    EpochAdvanced,
    Fingerprint,
    GoDecode,
    Hello,
    OpenDecode,
    Opened,
    OpenPrefill,
    PeerGone,
    PeerInfo,
    PeerUp,
    PrefillDone,
    Published,
    Refused,
    Report,
    SessionSpec,
    ToEngine,
    TurnDurable,
    Welcome,
)

BLOCK = 8
FINGERPRINT = Fingerprint(
    model="fake", revision="", dtype="float32", num_layers=2, token_layer_bytes=16,
    block_tokens=BLOCK, layout_id="plain",
)  # fmt: skip


@dataclass
class FakeSession:
    """What an engine holds for a request."""

    spec: SessionSpec
    read: tuple[int, int]
    ready: bool = False
    prefilled: bool = False
    good: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass
class Shared:
    """What the engines of a test have in common: the store, and what went wrong."""

    stored: set[tuple[bytes, bytes]] = field(default_factory=set)
    events: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    writers: dict[tuple[str, int], str] = field(default_factory=dict)


class FakeEngine:
    """One engine. ``hold`` names the points at which it stops until ``release``:
    allocate, open, prefill, prefill_done, decode, token, durable, close, tokenize."""

    def __init__(self, shared: Shared, role: Role, rank: int, node: str, control_port: int) -> None:
        self.shared = shared
        self.role = role
        self.rank = rank
        self.node = node
        self.name = engine_name(role, rank)
        self.control_port = control_port
        self.fingerprint = FINGERPRINT
        self.secret = ""
        self.protocol = PROTOCOL_VERSION
        self.weights_changed = False
        self.in_place = False
        self.answers: list[Any] = []
        self.peers: dict[str, str] = {}
        self.sessions: dict[tuple[str, int], FakeSession] = {}
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.aborted = 0
        self.eos_at: int | None = None
        self.first_text: str | None = None
        self.fail_open = ""
        self.fail_open_permanent = False
        self.fail_prefill = ""
        self.http_status: dict[str, int] = {}
        self.break_stream_after: int | None = None
        self.hbm_tokens = 10_000
        self.read_bytes = 0
        self.read_queue_tokens = 0
        self.counters: dict[str, float] = {}
        self.report_interval_s = 0.02
        self.prefill_token_s = 0.0
        self._gates: dict[str, asyncio.Event] = {}
        self._channel: Channel[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.welcome: Welcome | None = None
        self.refused: str | None = None
        self.silent = False
        self.killed = False

    # ---- life --------------------------------------------------------------------------------

    async def start(self) -> FakeEngine:
        """Join the front; ``refused`` says whether it was let in."""
        self.incarnation = secrets.token_hex(4)
        # Its death has to be a real one: the front asks the kernel.
        self._process = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - a few milliseconds
        app = web.Application(client_max_size=1 << 26, middlewares=[refuse_malformed])
        app.router.add_get("/health", self._health)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await self.join()
        return self

    async def join(self) -> None:
        """Connect and shake hands."""
        self._channel = await connect("127.0.0.1", self.control_port, ToEngine, 2.0)  # type: ignore[arg-type]
        assert self._process is not None
        self._channel.send(
            Hello(
                protocol=self.protocol,
                peer=PeerInfo(
                    engine=self.name,
                    incarnation=self.incarnation,
                    agent_metadata=b"",
                    buffer=BufferInfo(base_address=0, slot_bytes=4096, slots=64),
                ),
                role=self.role.value,
                rank=self.rank,
                node=self.node,
                pid=self._process.pid,
                host_id=host_id(),
                http_url=self.url,
                fingerprint=self.fingerprint,
                max_batched_tokens=2048,
                stats=self._stats(),
                weights_changed=self.weights_changed,
                weights_in_place=self.in_place,
                secret=self.secret,
            )
        )
        answer = await self._channel.receive()
        if isinstance(answer, Refused):
            self.refused = answer.reason
            await self._channel.close()
            return
        assert isinstance(answer, Welcome)
        self.welcome = answer
        self._spawn(self._listen(self._channel))
        self._spawn(self._report(self._channel))

    async def stop(self) -> None:
        """End everything, orderly or not."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def kill(self) -> None:
        """As ``kill -9``: connections break and the process is gone."""
        self.shared.events.append(f"{self.name} killed")
        for writer in [name for name, engine in self.shared.writers.items() if engine == self.name]:
            del self.shared.writers[writer]
        self.killed = True
        self.sessions.clear()
        await self.stop()

    async def drop_control(self) -> None:
        """Lose the control connection; the process lives, and so may its transfers."""
        assert self._channel is not None
        await self._channel.close()

    async def rejoin(self) -> None:
        """End everything old, then come back as the same process."""
        for key in list(self.sessions):
            self._forget(key)
        await self.join()

    def hold(self, point: str) -> None:
        """Stop at ``point`` from now on."""
        self._gates[point] = asyncio.Event()

    def release(self, point: str) -> None:
        """Go on."""
        self._gates.pop(point).set()

    async def _gate(self, point: str) -> None:
        gate = self._gates.get(point)
        if gate is not None:
            self.shared.events.append(f"{self.name} holds {point}")
            await gate.wait()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def send(self, message: Any) -> None:
        """To the front."""
        if self._channel is not None:
            self._channel.send(message)

    def _stats(self) -> EngineStats:
        return EngineStats(
            hbm_tokens_total=self.hbm_tokens if self.role is Role.DECODE else 0,
            buffer_slots_total=64,
            sessions=len(self.sessions),
            read_queue_tokens=self.read_queue_tokens,
            counters={"storage_read_bytes": float(self.read_bytes), **self.counters},
        )

    async def _report(self, channel: Channel[Any]) -> None:
        while True:
            await asyncio.sleep(self.report_interval_s)
            if not self.silent:
                channel.send(Report(stats=self._stats()))

    # ---- control -----------------------------------------------------------------------------

    async def _listen(self, channel: Channel[Any]) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._take(await channel.receive())

    def _take(self, message: Any) -> None:
        shared = self.shared
        match message:
            case PeerUp(peer=peer, quiet=quiet):
                self.peers[peer.engine] = peer.incarnation
                if not quiet:
                    shared.events.append(f"{self.name} told {peer.engine} may still write")
            case PeerGone():
                shared.events.append(f"{self.name} told {message.engine} gone")
                self.peers.pop(message.engine, None)
            case OpenDecode(spec=spec, read=read):
                session = self.sessions[spec.rid, spec.attempt] = FakeSession(spec, read)
                self._session_task(session, self._open_decode(session))
            case OpenPrefill(spec=spec, read=read):
                if self.peers.get(message.decode_engine) != message.decode_incarnation:
                    shared.faults.append(f"{self.name} was sent to an unknown peer")
                if len(message.slots) != -(-spec.prompt_tokens // BLOCK):
                    shared.faults.append("slots do not cover the prompt")
                session = self.sessions[spec.rid, spec.attempt] = FakeSession(spec, read)
                shared.writers[spec.rid, spec.attempt] = self.name
                self._session_task(session, self._open_prefill(session))
            case GoDecode():
                session = self.sessions[message.rid, message.attempt]
                session.ready = True
                session.good = message.good_blocks
                if not message.decode:
                    self._session_task(session, self._persist(session, []))
            case Close():
                key = (message.rid, message.attempt)
                shared.events.append(f"{self.name} close {message.attempt}")
                if self.role is Role.DECODE and key in shared.writers:
                    shared.faults.append(f"{self.name} told to close while a PE may still write")
                self._spawn(self._close(key))
            case _:
                self.answers.append(message)

    def _session_task(self, session: FakeSession, work: Any) -> None:
        task = self._spawn(work)
        session.tasks.add(task)

    async def _close(self, key: tuple[str, int]) -> None:
        await self._gate("close")
        self._forget(key)
        self.send(Closed(rid=key[0], attempt=key[1]))

    def _forget(self, key: tuple[str, int]) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            for task in session.tasks:
                task.cancel()
        if self.role is Role.PREFILL:
            self.shared.writers.pop(key, None)

    def _read(self, session: FakeSession) -> int:
        """Good blocks of the range; bad ones are dropped from the index."""
        first, last = session.read
        for index in range(first, last):
            key = session.spec.keys[index]
            if not session.spec.bypass and (session.spec.root, key) not in self.shared.stored:
                self.send(Dropped(root=session.spec.root, keys=[key], reason="missing"))
                return index - first
        self.read_bytes += (last - first) * 100
        return last - first

    def _refuses_open(self, spec: SessionSpec) -> bool:
        if not self.fail_open:
            return False
        error, self.fail_open = self.fail_open, ""
        self.send(
            Opened(
                rid=spec.rid, attempt=spec.attempt, error=error, permanent=self.fail_open_permanent
            )
        )
        return True

    async def _open_decode(self, session: FakeSession) -> None:
        spec = session.spec
        await self._gate("allocate")
        if self._refuses_open(spec):
            return
        slots = list(range(-(-spec.prompt_tokens // BLOCK)))
        self.send(Allocated(rid=spec.rid, attempt=spec.attempt, slots=slots))
        await self._gate("open")
        self.send(Opened(rid=spec.rid, attempt=spec.attempt, good_blocks=self._read(session)))

    async def _open_prefill(self, session: FakeSession) -> None:
        spec = session.spec
        await self._gate("open")
        if self._refuses_open(spec):
            return
        self.send(Opened(rid=spec.rid, attempt=spec.attempt, good_blocks=self._read(session)))

    async def _persist(self, session: FakeSession, answer: list[int]) -> None:
        """Blocks of prompt and answer become durable; the last token has no KV yet."""
        spec = session.spec
        prompt = session.prompt if hasattr(session, "prompt") else None
        keys = list(spec.keys)
        if answer and prompt is not None:
            whole = [*prompt, *answer[:-1]]
            keys = chain_keys(spec.root, whole, BLOCK)
        parents = [spec.root, *keys]
        await self._gate("durable")
        if spec.persist or spec.bypass:
            blocks = [
                BlockRef(key=key, parent=parents[index])
                for index, key in enumerate(keys)
                if index >= session.good
            ]
            self.shared.stored.update((spec.root, block.key) for block in blocks)
            self.send(Published(root=spec.root, blocks=blocks))
        self.send(TurnDurable(rid=spec.rid, attempt=spec.attempt))

    # ---- HTTP --------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(("/tokenize", body))
        await self._gate("tokenize")
        if (status := self.http_status.get("/tokenize")) is not None:
            return error_answer(status)
        ids = chat_tokens(body["messages"]) if "messages" in body else tokens_of(body["prompt"])
        return web.json_response({"count": len(ids), "max_model_len": 512, "tokens": ids})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(("/v1/completions", body))
        if (status := self.http_status.get("/v1/completions")) is not None:
            return error_answer(status)
        if self.role is Role.PREFILL:
            return await self._prefill(request, body)
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else tokens_of(prompt)
        return await self._generate(request, body, ids, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(("/v1/chat/completions", body))
        if (status := self.http_status.get("/v1/chat/completions")) is not None:
            return error_answer(status)
        parameters = body.get("kv_transfer_params") or {}
        ids = parameters.get("prompt_token_ids") or chat_tokens(body["messages"])
        return await self._generate(request, body, ids, chat=True)

    def _session(self, body: dict[str, Any]) -> FakeSession | None:
        parameters = (body.get("kv_transfer_params") or {}).get("dualpath")
        if parameters is None:
            return None
        session = self.sessions.get((parameters["rid"], parameters["attempt"]))
        if session is None and not self.killed:
            self.shared.faults.append(f"{self.name}: a request without its session")
        return session

    async def _prefill(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        session = self._session(body)
        assert session is not None
        hit = body["kv_transfer_params"]["dualpath"]["hit_tokens"]
        if hit % BLOCK or hit > session.spec.hit_blocks * BLOCK or hit >= len(body["prompt"]):
            self.shared.faults.append(f"a hit of {hit} tokens")
        try:
            await self._gate("prefill")
            await asyncio.sleep(self.prefill_token_s * (len(body["prompt"]) - hit))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        answer = generate(body["prompt"], 1, self.eos_at)
        text = text_of(answer) if self.first_text is None else self.first_text
        spec = session.spec
        self._session_task(session, self._prefill_done(spec))
        stop = answer[-1] == EOS and not body.get("ignore_eos")
        return web.json_response(
            {
                "id": f"cmpl-{request.headers['x-request-id']}",
                "object": "text_completion",
                "created": 1000,
                "model": body["model"],
                "choices": [
                    {
                        "index": 0, "text": text, "logprobs": None,
                        "finish_reason": "stop" if stop else "length", "stop_reason": None,
                        "token_ids": answer, "prompt_token_ids": body["prompt"],
                    }
                ],
                "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1},
            }
        )  # fmt: skip

    async def _prefill_done(self, spec: SessionSpec) -> None:
        await self._gate("prefill_done")
        error, self.fail_prefill = self.fail_prefill, ""
        self.send(PrefillDone(rid=spec.rid, attempt=spec.attempt, error=error))

    async def _generate(
        self, request: web.Request, body: dict[str, Any], ids: list[int], *, chat: bool
    ) -> web.StreamResponse:
        session = self._session(body)
        if session is not None:
            if not session.ready:
                self.shared.faults.append(f"{self.name}: decode before GoDecode")
            loaded = body["kv_transfer_params"]["dualpath"]["loaded_tokens"]
            if loaded != session.spec.prompt_tokens or len(ids) - loaded not in (0, 1):
                self.shared.faults.append(f"{loaded} tokens loaded of {len(ids)}")
            if chain_keys(session.spec.root, ids[:loaded], BLOCK) != session.spec.keys:
                self.shared.faults.append("keys of another prompt")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        answer = generate(ids, limit, self.eos_at)
        finish = "stop" if answer[-1] == EOS else "length"
        render = Render(request, body, ids, chat)
        try:
            await self._gate("decode")
            if not body.get("stream"):
                if session is not None:
                    await self._finish(session, ids, answer)
                return web.json_response(render.whole(answer, finish))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for event in render.opening():
                await send_event(response, event)
            for index, token in enumerate(answer):
                await self._gate("token")
                if self.break_stream_after == index:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                last = index == len(answer) - 1
                for choice in range(body.get("n") or 1):
                    event = render.token(token, index + 1, finish if last else None)
                    event["choices"][0]["index"] = choice
                    await send_event(response, event)
            if session is not None:
                await self._finish(session, ids, answer)
            if (body.get("stream_options") or {}).get("include_usage"):
                await send_event(response, render.closing(len(answer)))
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        return response

    async def _finish(self, session: FakeSession, ids: list[int], answer: list[int]) -> None:
        session.prompt = ids  # type: ignore[attr-defined]
        self._session_task(session, self._persist(session, answer))

    async def change_weights(self) -> int:
        """As vLLM's own update call; the acknowledged epoch."""
        from dualpath.control.messages import WeightsChanged

        self.in_place = True
        self.send(WeightsChanged(how="test", serial=7))
        while not self.answers:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        answer = self.answers.pop()
        assert isinstance(answer, EpochAdvanced)
        assert answer.serial == 7
        return answer.weight_epoch


__all__ = ["BLOCK", "FINGERPRINT", "FakeEngine", "Shared", "extend_keys"]
