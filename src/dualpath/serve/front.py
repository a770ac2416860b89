"""The front: control server, HTTP API and scheduler in one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from dualpath.config import ClusterConfig, ConfigError, Mode, Role
from dualpath.control.messages import Dropped
from dualpath.serve import background
from dualpath.serve.balance import Balance
from dualpath.serve.body import Call
from dualpath.serve.closing import Closer
from dualpath.serve.control import ControlServer
from dualpath.serve.dispatch import Dispatcher, RequestsUnderWay
from dualpath.serve.epoch import WeightEpoch
from dualpath.serve.first_token import EngineHabits
from dualpath.serve.index import BlockIndex, scan_store
from dualpath.serve.lifecycle import answer
from dualpath.serve.members import Member, Members
from dualpath.serve.metrics import FrontMetrics
from dualpath.serve.modes import plan_for
from dualpath.serve.record import Record, RecordLog
from dualpath.serve.reply import Reply
from dualpath.serve.tally import PromptTally
from dualpath.serve.turn import Services, Turn
from dualpath.serve.upstream import Upstream
from dualpath.spans import spans_for

logger = logging.getLogger(__name__)
_GRACE_TRANSFERS = 2
_PROBE_INTERVAL_S = 0.25


class Front:
    """Everything behind the API. Make it inside a running loop; ``start`` before, ``close`` after
    use. Belongs to that loop."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.plan = plan_for(config.mode, config)
        self.index = BlockIndex()
        self.records = RecordLog(spans_for(config.log.timeline, "front"))
        self.tally = PromptTally()
        self.metrics = FrontMetrics(self)
        self.epoch = WeightEpoch(config.storage, self.index.clear)
        self.members = Members(
            self._member_changed,
            report_timeout_s=config.scheduler.report_timeout,
            stuck_s=config.scheduler.report_timeout + config.timeouts.layer,
            grace_s=_GRACE_TRANSFERS * config.timeouts.transfer,
            died=self._died,
        )
        self.balance = Balance(config, self.members)
        self.dispatcher = Dispatcher(config, self.members)
        self.control = ControlServer(
            config,
            self.members,
            self.index,
            self.epoch,
            late=lambda kind: self.metrics.late.labels(kind).inc(),
            dropped=self._dropped,
        )
        self.closer = Closer(
            _GRACE_TRANSFERS * config.timeouts.transfer,
            self.metrics.overdue.inc,
            self._died,
            self.members.current,
        )
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._callback_failed)
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        self._services: Services | None = None
        self._open = 0
        self._draining = False
        self._background: list[asyncio.Task[None]] = []
        self._probed: set[Member] = set()
        self._probes: set[asyncio.Task[None]] = set()

    # ---- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read epoch and index from the store, then let engines in.

        Raises:
            StoreError: the store cannot be read.
            OSError: the control address cannot be bound.
        """
        await self.epoch.load()
        self.index.add(await asyncio.to_thread(scan_store, self.config.storage))
        habits = await asyncio.to_thread(EngineHabits.of, self.config)
        self._services = Services(
            config=self.config,
            members=self.members,
            dispatcher=self.dispatcher,
            index=self.index,
            epoch=self.epoch,
            upstream=Upstream(self.config.timeouts.connect),
            closer=self.closer,
            metrics=self.metrics,
            habits=habits,
        )
        for name, work in (
            ("dispatcher", self.dispatcher.run()),
            ("watch over silent engines", self.dispatcher.watch_silence()),
            ("balance figures", self.balance.run()),
            ("decision log", self.dispatcher.write_decisions()),
        ):
            self._background.append(background.start(work, name, self._died, endless=True))
        await self.control.start()
        logger.info("%d stored blocks, weight epoch %d", len(self.index), self.epoch.number)

    def drain(self) -> None:
        """Take no new requests; ``ready`` turns false."""
        self._draining = True

    async def close(self) -> None:
        """End sessions and connections. The HTTP server has ended its requests before."""
        self.drain()
        await self.closer.drain(self.config.timeouts.drain)
        ending = [*self._background, *self._probes]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self.control.close()
        await self.dispatcher.close()
        self.records.close()
        if self._services is not None:
            await self._services.upstream.close()

    # ---- requests ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self.members.ready and not self._draining and not self.failed.done()

    @property
    def draining(self) -> bool:
        """Whether the front is stopping."""
        return self._draining

    async def answer(self, call: Call, tenant: str, reply: Reply) -> None:
        """Answer one request; see ``lifecycle.answer``."""
        assert self._services is not None, "not started"
        rid = secrets.token_hex(12)
        record = Record(rid=rid, endpoint=call.endpoint.value, mode=self.plan.mode.value)
        turn = Turn(
            rid=rid,
            call=call,
            tenant=tenant,
            plan=self.plan,
            deadline=asyncio.get_running_loop().time() + self.config.timeouts.request,
            record=record,
            reply=reply,
        )
        self._open += 1
        self.metrics.open.inc()
        try:
            await answer(self._services, turn)
        finally:
            self._open -= 1
            self.metrics.open.dec()
            self.records.add(record)
            self.tally.add(call, record)
            self.metrics.finished(record)

    def set_mode(self, mode: Mode, policy: str = "") -> None:
        """Serve in another mode from now on, with the mode's own policies or those called
        ``policy``. Only while nothing is under way.

        Raises:
            RequestsUnderWay: requests are under way.
            ValueError: no policy is called so.
            ConfigError: the mode is not allowed here.
        """
        plan = plan_for(mode, self.config)
        if mode is Mode.BASIC and any(m.hello.layer_regions for m in self.members.all()):
            raise ConfigError(
                "mode: prefill engines whose layers take turns in memory cannot load all layers at "
                "once; start the cluster with mode = 'basic' or engine.layer_aliasing = false"
            )
        if self._open:
            raise RequestsUnderWay("requests are under way")
        self.dispatcher.set_mode(mode, policy)
        self.plan = plan
        logger.warning("mode is %s now", mode.value)

    # ---- looking in ----------------------------------------------------------------------------

    def engines(self) -> list[Member]:
        """Connected engines."""
        return self.members.all()

    def figures(self) -> dict[str, float]:
        """Gauges of the front itself."""
        return {
            "index_blocks": len(self.index),
            "weight_epoch": self.epoch.number,
            "weight_epoch_settled": float(self.epoch.settled),
            "ready": float(self.ready),
            "scheduler_waiting_requests": self.dispatcher.waiting,
            "sessions_closing": len(self.closer),
            "decision_log_lines_lost": self.dispatcher.log_lines_lost,
            **self.balance.figures(),
        }

    def node_figures(self) -> dict[str, dict[str, float]]:
        """Gauges of the nodes."""
        return self.balance.by_node()

    def expected(self) -> dict[str, int]:
        """Engines that the description has, by role."""
        return {role.value: len(self.config.engines(role)) for role in Role}

    def state(self) -> dict[str, Any]:
        """Everything that is held anywhere; all of it is zero when nothing is under way."""
        return {
            "mode": self.plan.mode.value,
            "policy": self.dispatcher.policy,
            "ready": self.ready,
            "weight_epoch": self.epoch.number,
            "index_blocks": len(self.index),
            "requests_open": self._open,
            "sessions_closing": len(self.closer),
            "snic": self.members.total("storage_read_bytes"),
            "path": {
                "pe": int(self._path_bytes("pe")),
                "de": int(self._path_bytes("de")),
                "split": int(self.metrics.split_bytes._value.get()),
            },
            "tokens": {"hit": self.tally.hit, "miss": self.tally.miss},
            "kv": self._kv(),
            "scheduler": self.dispatcher.snapshot(),
            "engines": [_engine_state(member) for member in self.members.all()],
        }

    def attention(self) -> dict[str, Any]:
        """Attention measurements of every connected PE, by name."""
        return {
            member.name: member.attention.as_dict()
            for member in self.members.all()
            if member.role is Role.PREFILL
        }

    def check_integrity(self) -> None:
        """Recount every ledger of the front.

        Raises:
            AssertionError: one is off.
        """
        self.index.check_integrity()
        self.dispatcher.check_integrity()

    def _kv(self) -> dict[str, int] | None:
        """Sizes that the engines agree on; None before the first one has come."""
        agreed = self.control.fingerprint
        if agreed is None:
            return None
        token_bytes = agreed.num_layers * agreed.token_layer_bytes
        return {"token_bytes": token_bytes, "block_tokens": agreed.block_tokens}

    def _path_bytes(self, side: str) -> float:
        return float(self.metrics.path_bytes.labels(side)._value.get())

    # ---- events ------------------------------------------------------------------------------

    def _member_changed(self, member: Member) -> None:
        if not member.serving and not member.lost.done() and member not in self._probed:
            self._probed.add(member)
            task = background.start(self._probe(member), f"probe of {member.name}", self._died)
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)
        self.dispatcher.sync(member)

    async def _probe(self, member: Member) -> None:
        """An engine joins when its cache is allocated, before its HTTP server listens."""
        assert self._services is not None
        while not member.lost.done():
            if await self._services.upstream.healthy(
                member.hello.http_url, self.config.timeouts.connect
            ):
                self.members.serves(member)
                break
            await asyncio.wait({member.lost}, timeout=_PROBE_INTERVAL_S)
        self._probed.discard(member)

    def _dropped(self, message: Dropped) -> None:
        self.metrics.dropped_blocks.labels(message.reason).inc(len(message.keys))

    def _died(self, name: str, error: BaseException) -> None:
        """A part of the front is dead: ``health`` says so, and who runs the front ends it."""
        logger.error("the front cannot go on: %s died", name, exc_info=error)
        if not self.failed.done():
            self.failed.set_result(error)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's last resort: nobody else hears of an error in a callback of it."""
        error = context.get("exception")
        if "handle" in context and isinstance(error, BaseException):
            self._died(str(context["message"]), error)
        else:
            loop.default_exception_handler(context)


def _engine_state(member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "role": member.role.value,
        "node": member.hello.node,
        "incarnation": member.peer.incarnation,
        "pid": member.hello.pid,
        "url": member.hello.http_url,
        "usable": member.usable,
        "failing": member.failing,
        "open_sessions": member.sessions.names(),
        "stats": member.stats,
    }
