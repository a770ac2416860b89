"""The traffic manager: one thread per engine that moves all of its bytes.

It owns the buffers, the peers, the store and the control connection, and runs one asyncio loop.
vLLM's thread talks to it through ``call`` (fire and forget) and through the thread-safe objects in
``loads``; it never waits for the loop itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

import msgspec

from dualpath.config import FrontConfig
from dualpath.control.channel import Channel, ChannelError, connect
from dualpath.control.messages import (
    Close,
    Closed,
    EngineStats,
    EpochAdvanced,
    Failing,
    GoDecode,
    Hello,
    Message,
    OpenDecode,
    OpenPrefill,
    PeerGone,
    PeerInfo,
    PeerUp,
    Refused,
    Report,
    ToEngine,
    WeightsChanged,
    Welcome,
)
from dualpath.transfer.copying import Fence
from dualpath.transfer.decode import DecodeSession
from dualpath.transfer.prefill import PrefillSession
from dualpath.transfer.services import Services

logger = logging.getLogger(__name__)

Session = PrefillSession | DecodeSession
Build = Callable[[Callable[[Message], None], Callable[[str], None]], tuple[Services, bytes]]
_RECONNECT_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


class HandshakeRefused(RuntimeError):
    """The front will not have this engine; the message says which field differs."""


class EngineFailing(RuntimeError):
    """A background part of this engine died; it must not serve."""


class AttentionSource(Protocol):
    """What attention has cost an engine. Called in the traffic thread; never waits or raises."""

    @property
    def total_s(self) -> float:
        """Seconds of attention since the start, all steps; never falls."""
        ...

    def take(self) -> list[tuple[int, int, float]]:
        """``(cached tokens, computed tokens, seconds)`` of each step of a single request since the
        last call."""
        ...


class TrafficManager:
    """Runs sessions for one engine.

    Life: construct, ``start`` (returns when the front has accepted or refused the engine, or was
    not there within the connect deadline), ``call`` from vLLM's thread, ``stop``.

    Args:
        hello: what is sent at the handshake, but for the figures known only then.
        build: makes the services and the peer agent's metadata; called in the traffic thread,
            given ``send`` and ``on_crash``.
        control: where the front listens.
        live_stats: vLLM's own figures; called in the traffic thread at every report.
        connect_timeout_s: how long ``start`` waits for the front's answer.
        attention: measured on a PE, None on a DE.
    """

    def __init__(
        self,
        hello: Hello,
        build: Build,
        control: FrontConfig,
        live_stats: Callable[[], dict[str, int]],
        connect_timeout_s: float,
        attention: AttentionSource | None = None,
    ) -> None:
        self._hello = hello
        self._build = build
        self._control = control
        self._live_stats = live_stats
        self._connect_timeout_s = connect_timeout_s
        self._attention = attention
        self._sessions: dict[tuple[str, int], Session] = {}
        self._limbo: list[DecodeSession] = []
        self._channel: Channel[ToEngine] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: str | None = None
        self._serial = 0
        self._epoch_waits: dict[int, Future[int]] = {}
        self._unacknowledged_weights = False
        self._answer: Future[None] = Future()
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="dualpath-traffic", daemon=True)

    # ---- vLLM's thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread.

        Raises:
            HandshakeRefused: the front answered no.
            Exception: building the services failed (no memory, no store, no transfer library).
        """
        self._thread.start()
        try:
            self._answer.result(self._connect_timeout_s)
        except TimeoutError:
            if self._answer.done():
                raise
            logger.warning(
                "no front at %s:%d yet; going on trying",
                self._control.control_host,
                self._control.control_port,
            )

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the traffic thread soon, in order.

        Raises:
            EngineFailing: the thread is dead.
        """
        loop = self._loop
        if self._crash is not None or loop is None or loop.is_closed():
            raise EngineFailing(self._crash or "the traffic manager has stopped")
        loop.call_soon_threadsafe(self._guarded, work)

    def count(self, **amounts: int) -> None:
        """Add to totals of this engine that vLLM's thread knows of.

        Raises:
            EngineFailing: the traffic thread is dead.
        """
        self.call(lambda: self._services.counters.update(amounts))

    def fence(self, stream: int) -> Fence | None:
        """Mark the end of what was launched on the device's ``stream``; see ``CopyEngine``."""
        return self._services.copy_engine.fence(stream)

    def session(self, rid: str, attempt: int) -> Session | None:
        """The open session of that name. Safe from any thread (a dict look-up)."""
        return self._sessions.get((rid, attempt))

    def weights_changed(self, how: str, timeout_s: float) -> int:
        """Advance the cluster's weight epoch; returns when it is durable.

        Raises:
            TimeoutError: no front acknowledged it. The change is announced again at the next
                handshake, before this engine gets any work; until then the caller must not
                assume that old KV is unreachable.
        """
        answer: Future[int] = Future()

        def ask() -> None:
            self._unacknowledged_weights = True
            self._serial += 1
            self._epoch_waits[self._serial] = answer
            if self._channel is not None:
                self._send(WeightsChanged(how=how, serial=self._serial))

        self.call(ask)
        return answer.result(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Close every session and end the thread."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                loop.call_soon_threadsafe(stopping.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the traffic thread did not end within %g s", timeout_s)

    # ---- traffic thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # last resort: whatever it was, the engine must not go on
            logger.exception("the traffic manager died")
            self._crash = f"the traffic manager died: {type(error).__name__}: {error}"
            if not self._answer.done():
                self._answer.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._callback_failed)
        self._stopping = asyncio.Event()
        self._services, metadata = self._build(self._send, self._on_crash)
        services = self._services
        peer = msgspec.structs.replace(self._hello.peer, agent_metadata=metadata)
        self._hello = msgspec.structs.replace(self._hello, peer=peer)
        try:
            connector = services.spawn(self._stay_connected(), "control connection", self._tasks)
            await self._stopping.wait()
            connector.cancel()
            await asyncio.gather(connector, return_exceptions=True)
            self._close_all("the engine is stopping")
            # Bounded: the process ends anyway, and with it every transfer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(services.timeouts.drain):
                    for session in list(self._sessions.values()):
                        await session.closed.wait()
        finally:
            if self._channel is not None:
                await self._channel.close()
            await services.agent.close()
            services.shutdown()
            services.store.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a bug here would otherwise only be logged by the loop
            logger.exception("traffic manager call failed")
            self._on_crash(f"{type(error).__name__}: {error}")

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's last resort: nobody else hears of an error in a callback of it."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._on_crash(f"{context['message']}: {type(error).__name__}: {error}")

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _on_crash(self, reason: str) -> None:
        if self._crash is None:
            self._crash = reason
            logger.error("engine is failing: %s", reason)
            self._send(Failing(reason=reason))

    @property
    def failing(self) -> str | None:
        """Why this engine must not serve, or None."""
        return self._crash

    async def _stay_connected(self) -> None:
        """Keep one control connection; everything of a lost one is closed before the next Hello,
        so that a Hello also says: this PE does no I/O on anything older."""
        attempt = 0
        while True:
            try:
                channel: Channel[ToEngine] = await connect(
                    self._control.control_host,
                    self._control.control_port,
                    ToEngine,  # type: ignore[arg-type]
                    self._services.timeouts.connect,
                )
            except (TimeoutError, OSError):
                await asyncio.sleep(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            try:
                await self._serve(channel)
            except (EOFError, ChannelError) as error:
                logger.warning("control connection lost: %s", error)
            finally:
                self._channel = None
                await channel.close()
            self._close_all("the control connection was lost")
            for session in list(self._sessions.values()):
                if isinstance(session, PrefillSession):
                    await session.closed.wait()

    async def _serve(self, channel: Channel[ToEngine]) -> None:
        hello = msgspec.structs.replace(
            self._hello,
            stats=self._stats(),
            weights_changed=self._unacknowledged_weights,
            weights_in_place=self._serial > 0,
        )
        channel.send(hello)
        async with asyncio.timeout(self._services.timeouts.connect):
            answer = await channel.receive()
        if isinstance(answer, Refused):
            self._refused(answer.reason)
            # An engine that does not fit will not fit later; one whose name is still taken may.
            await asyncio.sleep(_RECONNECT_S[-1])
            return
        if not isinstance(answer, Welcome):
            raise ChannelError(f"expected Welcome, got {type(answer).__name__}")
        self._channel = channel
        if hello.weights_changed:
            self._weights_acknowledged(answer.weight_epoch)
        if not self._answer.done():
            self._answer.set_result(None)
        logger.info("joined front %s", answer.front)
        reporter = self._services.spawn(
            self._report(answer.report_interval_s), "reports", self._tasks
        )
        try:
            while True:
                self._dispatch(await channel.receive())
        finally:
            reporter.cancel()

    def _refused(self, reason: str) -> None:
        logger.error("the front refused this engine: %s", reason)
        if not self._answer.done():
            self._answer.set_exception(HandshakeRefused(reason))

    async def _report(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            samples = [] if self._attention is None else self._attention.take()
            self._send(Report(stats=self._stats(), attention=samples))

    def _stats(self) -> EngineStats:
        services = self._services
        live = self._live_stats()
        counters: dict[str, float] = dict(services.counters)
        counters["read_wait_seconds"] = services.read_wait_s
        counters.update(services.store.counters())
        counters.update(
            {f"agent_{name}": value for name, value in services.agent.counters().items()}
        )
        if self._attention is not None:
            counters["attention_seconds"] = self._attention.total_s
        return EngineStats(
            running=live.get("running", 0),
            waiting=live.get("waiting", 0),
            hbm_tokens_total=live.get("hbm_tokens_total", 0),
            hbm_tokens_used=live.get("hbm_tokens_used", 0),
            read_queue_tokens=services.read_queue_tokens,
            buffer_slots_total=services.buffer.pool.slots + services.staging.pool.slots,
            buffer_slots_used=services.buffer.pool.used + services.staging.pool.used,
            sessions=len(self._sessions) + len(self._limbo),
            transfers=services.agent.outstanding,
            counters=counters,
        )

    def _dispatch(self, message: ToEngine) -> None:
        match message:
            case OpenDecode(spec=spec):
                self._open(DecodeSession(self._services, message), spec.deadline_s)
            case OpenPrefill(spec=spec):
                self._open(PrefillSession(self._services, message), spec.deadline_s)
            case GoDecode():
                session = self.session(message.rid, message.attempt)
                if isinstance(session, DecodeSession):
                    session.go(message.good_blocks, decode=message.decode)
            case Close():
                session = self.session(message.rid, message.attempt)
                if session is not None:
                    session.close(message.reason)
                else:  # already gone: the answer must still come, the front waits for it
                    # This word comes after the PE's end: a session that had to end without it
                    # (this process was stopped beyond its deadline) has waited for it.
                    name = (message.rid, message.attempt)
                    self._let_go(lambda one: (one.spec.rid, one.spec.attempt) == name)
                    self._send_closed(message)
            case PeerUp():
                self._peer_up(message.peer, message.quiet)
            case PeerGone():
                self._peer_gone(message.engine, message.incarnation)
            case EpochAdvanced():
                self._epoch_waits_up_to(message.serial, message.weight_epoch)
            case Refused():
                raise ChannelError(f"refused in mid-connection: {message.reason}")
            case Welcome():
                raise ChannelError("a second Welcome")

    def _send_closed(self, message: Close) -> None:
        self._send(Closed(rid=message.rid, attempt=message.attempt))

    def _open(self, session: Session, deadline_s: float) -> None:
        name = (session.spec.rid, session.spec.attempt)
        if name in self._sessions:
            return  # a repeated message
        self._sessions[name] = session
        session.open()
        self._services.spawn(
            self._watch(name, session, deadline_s), f"session {session.owner}", self._tasks
        )

    async def _watch(self, name: tuple[str, int], session: Session, deadline_s: float) -> None:
        """Forget a session when it is closed; close it when the front forgot it."""
        opened_s = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                await session.closed.wait()
        except TimeoutError:
            logger.error("session %s passed its deadline; closing it", session.owner)
            self._services.counters["sessions_expired"] += 1
            self._close(session, "deadline")
            await session.closed.wait()
        del self._sessions[name]
        logger.info(
            "session %s is over after %.3f s",
            session.owner,
            time.monotonic() - opened_s,
            extra={"rid": session.spec.rid},
        )
        if isinstance(session, DecodeSession) and session.holds_remote:
            self._limbo.append(session)
            if session.remote_over:  # said while the session was closing without it
                self._let_go(lambda one: one is session)

    def _close(self, session: Session, reason: str) -> None:
        """Close without the front's word on the other side."""
        if isinstance(session, DecodeSession):
            session.close(reason, remote_over=False)
        else:
            session.close(reason)

    def _close_all(self, reason: str) -> None:
        for session in list(self._sessions.values()):
            self._close(session, reason)

    def _peer_up(self, peer: PeerInfo, quiet: bool) -> None:
        services = self._services
        old = services.peers.get(peer.engine)
        if old is not None and old.incarnation != peer.incarnation:
            services.agent.remove_peer(f"{old.engine}/{old.incarnation}")
        if old is None or old.incarnation != peer.incarnation:
            services.agent.add_peer(f"{peer.engine}/{peer.incarnation}", peer.agent_metadata)
        services.peers[peer.engine] = peer
        if quiet:
            self._release_limbo(peer.engine)

    def _peer_gone(self, engine: str, incarnation: str) -> None:
        services = self._services
        peer = services.peers.get(engine)
        if peer is not None and peer.incarnation == incarnation:
            del services.peers[engine]
            services.agent.remove_peer(f"{engine}/{incarnation}")
        self._release_limbo(engine)

    def _release_limbo(self, engine: str) -> None:
        """A quiet PE has none of its older transfers under way, nor has a dead one: after either
        word the slots promised to it are safe."""
        self._let_go(lambda session: session.prefill_engine == engine)

    def _let_go(self, over: Callable[[DecodeSession], bool]) -> None:
        """The PEs of these sessions in limbo do no more I/O on them."""
        free = [session for session in self._limbo if over(session)]
        self._limbo = [session for session in self._limbo if session not in free]
        for session in free:
            self._services.spawn(session.remote_gone(), f"limbo {session.owner}", self._tasks)

    def _epoch_waits_up_to(self, serial: int, epoch: int) -> None:
        for waiting in [number for number in self._epoch_waits if number <= serial]:
            answer = self._epoch_waits.pop(waiting)
            if not answer.done():
                answer.set_result(epoch)
        if not self._epoch_waits:
            self._unacknowledged_weights = False

    def _weights_acknowledged(self, epoch: int) -> None:
        self._epoch_waits_up_to(self._serial, epoch)
