"""Where engines connect: handshake, then their messages, one task per connection."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path

from dualpath.config import ClusterConfig, ConfigError, Role, engine_name
from dualpath.control.channel import Channel, ChannelError
from dualpath.control.messages import (
    PROTOCOL_VERSION,
    Allocated,
    Closed,
    Dropped,
    EpochAdvanced,
    Failing,
    Fingerprint,
    Hello,
    Opened,
    PrefillDone,
    Published,
    Refused,
    Report,
    ToFront,
    TurnDurable,
    WeightsChanged,
    Welcome,
)
from dualpath.serve import background
from dualpath.serve.epoch import WeightEpoch
from dualpath.serve.index import BlockIndex
from dualpath.serve.members import Member, Members
from dualpath.storage import StoreError

logger = logging.getLogger(__name__)
_RETRY_EPOCH_S = 1.0


class ControlServer:
    """Accepts engines.

    Args:
        late: told of every answer about a session that is not open any more.
        dropped: told of every ``Dropped`` message, after the index has forgotten the blocks.
    """

    def __init__(
        self,
        config: ClusterConfig,
        members: Members,
        index: BlockIndex,
        epoch: WeightEpoch,
        *,
        late: Callable[[str], None],
        dropped: Callable[[Dropped], None],
    ) -> None:
        self._config = config
        self._members = members
        self._index = index
        self._epoch = epoch
        self._late = late
        self._dropped = dropped
        self._secret = _read_secret(config.security.control_secret_file)
        self._fingerprint: Fingerprint | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the connected engines agree on; None before the first one."""
        return self._fingerprint

    @property
    def port(self) -> int:
        """The port listened on."""
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        front = self._config.front
        self._server = await asyncio.start_server(
            self._connected, front.control_host, front.control_port
        )

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        await self._members.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel: Channel[ToFront] = Channel(reader, writer, ToFront)  # type: ignore[arg-type]
        try:
            await self._serve(channel)
        except (EOFError, ChannelError, TimeoutError) as error:
            logger.info("a control connection ended: %s", error)
        except Exception:  # a fault here costs this engine its place, and must be seen
            logger.exception("a control connection met a fault in the front")
        finally:
            await channel.close()

    async def _serve(self, channel: Channel[ToFront]) -> None:
        async with asyncio.timeout(self._config.timeouts.connect):
            hello = await channel.receive()
        if not isinstance(hello, Hello):
            raise ChannelError(f"expected Hello, got {type(hello).__name__}")
        reason = self._refusal(hello)
        if reason is None and not await self._settle_epoch(hello):
            reason = "the weight epoch cannot be written to the store; try again"
        # Again: another engine may have joined while the epoch was being written.
        reason = reason or self._refusal(hello)
        if reason is not None:
            logger.error("engine %s refused: %s", hello.peer.engine, reason)
            channel.send(Refused(reason=reason))
            return
        self._fingerprint = hello.fingerprint
        member = Member(hello, channel)
        channel.send(
            Welcome(
                front=self._config.name,
                report_interval_s=float(self._config.scheduler.fetch_interval),
                weight_epoch=self._epoch.number,
            )
        )
        self._members.join(member)
        reason = "the connection was closed"
        try:
            while True:
                self._take(member, await channel.receive())
        except (EOFError, ChannelError) as error:
            reason = str(error)
        except Exception as error:
            reason = f"a fault in the front: {type(error).__name__}: {error}"
            raise
        finally:
            self._members.leave(member, reason)

    # ---- handshake ---------------------------------------------------------------------------

    def _refusal(self, hello: Hello) -> str | None:
        """Why this engine may not join, or None."""
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            return "secret: not the one in security.control_secret_file"
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol: {hello.protocol} != {PROTOCOL_VERSION}"
        place = _misplaced(hello, self._config)
        if place is not None:
            return place
        if hello.fingerprint.block_tokens != self._config.engine.block_tokens:
            return (
                f"block_tokens: {hello.fingerprint.block_tokens} != "
                f"{self._config.engine.block_tokens}, the front's engine.block_tokens"
            )
        held = self._members.get(hello.peer.engine)
        if held is not None and held.peer.incarnation != hello.peer.incarnation:
            return f"engine: another process is connected as {hello.peer.engine!r}"
        others = [member for member in self._members.all() if member is not held]
        if others and self._fingerprint is not None:
            difference = hello.fingerprint.difference(self._fingerprint)
            if difference is not None:
                return f"fingerprint: {difference} (this engine != the cluster)"
        return None

    async def _settle_epoch(self, hello: Hello) -> bool:
        """Advance the epoch when this engine's weights are not the cluster's; False when that
        failed.

        An engine that starts while the others run weights updated in place has loaded the older
        ones from disk (and the reverse after the last such engine is gone). KV written before
        it came would be wrong for it, so none of it may be hit any more.
        """
        if hello.weights_changed:
            reason = f"{hello.peer.engine} changed its weights while no front was there"
        elif hello.weights_in_place != self._epoch.in_place:
            reason = f"{hello.peer.engine} joined with other weights than the cluster's"
        else:
            return True
        in_place = (
            hello.weights_changed
            or hello.weights_in_place
            or any(member.in_place for member in self._members.all())
        )
        try:
            await self._epoch.advance(in_place=in_place, reason=reason)
        except (StoreError, TimeoutError) as error:
            logger.error("the weight epoch could not be advanced: %s", error)
            return False
        return True

    # ---- messages ----------------------------------------------------------------------------

    def _take(self, member: Member, message: ToFront) -> None:
        match message:
            case Report():
                member.attention.extend(message.attention)
                self._members.heard(member, message.stats)
            case Allocated() | Opened() | PrefillDone() | TurnDurable() | Closed():
                if not member.sessions.answer(message):
                    self._late(type(message).__name__)
            case Published():
                self._index.published(message)
            case Dropped():
                self._index.dropped(message)
                self._dropped(message)
            case WeightsChanged():
                self._spawn(member, self._weights_changed(member, message))
            case Failing():
                self._members.fail(member, message.reason)
            case Hello():
                raise ChannelError("a second Hello")

    async def _weights_changed(self, member: Member, message: WeightsChanged) -> None:
        member.in_place = True
        while not member.lost.done():
            try:
                number = await self._epoch.advance(
                    in_place=True, reason=f"{member.name}: {message.how}"
                )
            except (StoreError, TimeoutError) as error:
                logger.error("the weight epoch could not be advanced: %s", error)
                await asyncio.sleep(_RETRY_EPOCH_S)
            else:
                member.send(EpochAdvanced(serial=message.serial, weight_epoch=number))
                return

    def _spawn(self, member: Member, work: Coroutine[None, None, None]) -> None:
        def died(name: str, error: BaseException) -> None:
            logger.error("%s died", name, exc_info=error)
            self._members.fail(member, f"{name} died: {type(error).__name__}: {error}")

        task = background.start(work, f"new weights of {member.name}", died)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _misplaced(hello: Hello, config: ClusterConfig) -> str | None:
    """How the engine's place differs from the cluster description, or None."""
    try:
        role = Role(hello.role)
    except ValueError:
        return f"role: {hello.role!r} is neither 'prefill' nor 'decode'"
    places = config.engines(role)
    if not 0 <= hello.rank < len(places):
        return f"rank: {hello.rank} is outside 0..{len(places) - 1} for role {hello.role!r}"
    node, _ = places[hello.rank]
    if hello.node != node.name:
        return f"node: {hello.node!r} != {node.name!r}, where {hello.role} {hello.rank} belongs"
    name = engine_name(role, hello.rank)
    if hello.peer.engine != name:
        return f"engine: {hello.peer.engine!r} != {name!r}"
    return None


def _read_secret(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"security.control_secret_file: {path}: {error.strerror or error}"
        ) from None
