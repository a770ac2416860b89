"""Moves bytes between this process's memory and its peers', over one NIC in one traffic class.

An agent belongs to one asyncio loop and does all its work in callbacks of it: hand pieces to the
NIC, ask about those under way, serve peers. It is woken by UCX's own file descriptors where the
transport is TCP, and by timers otherwise, so that an idle agent costs next to nothing.

Submissions are cut into pieces, so that transfers and peers take turns (``Carrier``), a rate limit
is even, and what was not handed over yet can be called back.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from typing import Final

from dualpath.transfer.carrier import Carrier
from dualpath.transfer.descriptors import Ints, descriptors
from dualpath.transfer.errors import AgentClosed, TransferTimeout
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import NixlEndpoint, Op, UcxSettings
from dualpath.transfer.pacer import Pacer
from dualpath.transfer.transfer import Transfer

PIECE_BYTES: Final = 4 << 20
"""A post of so many bytes takes 1-3 ms, during which the loop does nothing else."""
_PACED_PIECE_S: Final = 0.02
_MIN_PIECE_BYTES: Final = 64 << 10
_MIN_SPACING_S: Final = 100e-6
"""Readiness that progress does not clear must not spin the loop faster than this."""


class PeerAgent:
    """A transfer agent. Every method is called in the thread of one running event loop.

    Args:
        name: unique in the cluster and per start of the process.
        device: UCX's name of the NIC (``eth0``; ``mlx5_0:1``); empty for any interface.
        ports: ``low-high`` TCP ports; empty for any.
        rate_bytes_s: limit per direction on what this agent writes and reads. What peers write
            here is limited by their agents only.
        transports: UCX's transport, see ``UcxSettings``; empty for TCP, or RDMA by ``device``.
        piece_bytes: most bytes handed to the NIC at once.
        user_timeout_s: a TCP connection that accepts nothing for so long is broken.
        service_level, traffic_class: marks of its packets on InfiniBand and RoCE.

    Raises:
        NixlMissing, AgentSetupError: see ``NixlEndpoint``.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "",
        ports: str = "",
        rate_bytes_s: float = math.inf,
        transports: str = "",
        piece_bytes: int = PIECE_BYTES,
        user_timeout_s: float = 10.0,
        service_level: int | None = None,
        traffic_class: int | None = None,
    ) -> None:
        settings = UcxSettings(
            device, ports, transports, user_timeout_s, service_level, traffic_class
        )
        self.name = name
        self._endpoint = NixlEndpoint(name, settings)
        self._event_driven = settings.event_driven and bool(self._endpoint.ready_fds)
        # Each direction of the NIC has the whole rate.
        pacers = {op: Pacer(rate_bytes_s) for op in Op}
        if pacers[Op.WRITE].limited:
            paced = max(_MIN_PIECE_BYTES, int(rate_bytes_s * _PACED_PIECE_S))
            piece_bytes = min(piece_bytes, paced)
        self._counts: Counter[str] = Counter()
        self._carrier = Carrier(self._endpoint, pacers, self._counts, piece_bytes)
        self._regions: list[Region] = []
        self._passive = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._thread = threading.get_ident()
        self._closed = False
        self._last_tick = -math.inf

    # ---- setting up ---------------------------------------------------------------------------

    def register(self, region: Region) -> None:
        """Make memory usable as source or target, by this side and by its peers. The agent keeps
        the region open until ``close``.

        Raises:
            AgentSetupError: the memory cannot be registered.
        """
        self._check_thread()
        self._endpoint.register(region)
        self._regions.append(region)

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``. Take it after the last ``register``. Peers are
        served from now on."""
        self._check_thread()
        self._start()
        return self._endpoint.metadata()

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make a peer known, by its agent's own name. Both sides must know each other before one
        reads from the other, because the owner of the memory writes it back (see ``reads``).

        A peer of that name that is there already is replaced, as after its restart. Nothing is
        connected yet, and nothing fails here: a peer that cannot be reached, or whose metadata is
        stale, not its own or not metadata, fails its transfers with ``PeerLost``.
        """
        self._check_thread()
        self._start()
        self._carrier.add_peer(name, metadata)

    def remove_peer(self, name: str) -> None:
        """Forget a peer, whose process must be known to have ended: its transfers fail with
        ``PeerLost`` and settle when they are over. (Should it live, they settle when it answers;
        if it is cut off meanwhile, it might write later than that.) No such peer is no error.
        Does not keep the peer from writing here: see ``drain``."""
        self._check_thread()
        self._carrier.remove_peer(name)
        self._wake()

    def set_passive(self, active: bool) -> None:
        """Say that peers are about to read from, or write to, this side (True), or no longer
        (False). Calls nest. Only a hint, for transports without file descriptors to wait on:
        they are then served every millisecond instead of every ten.

        Raises:
            RuntimeError: False more often than True.
        """
        self._check_thread()
        self._passive += 1 if active else -1
        if self._passive < 0:
            self._passive = 0
            raise RuntimeError(f"{self.name}: more passive phases ended than were begun")
        self._wake()

    # ---- moving bytes -------------------------------------------------------------------------

    def submit(self, op: Op, peer: str, local: Ints, remote: Ints, sizes: Ints | int) -> Transfer:
        """Queue a transfer of many ranges. Never waits.

        An unknown peer and a closed agent give a transfer that has failed (and settled) already,
        so that there is one place to look for failures.

        Args:
            op: WRITE copies local to remote, READ the other way.
            local: addresses in memory registered here.
            remote: addresses in memory registered there.
            sizes: bytes of each range, or one number for all.

        Raises:
            ValueError: the lists do not fit together or are empty.
        """
        self._check_thread()
        ranges = descriptors(local, remote, sizes)
        merged = ranges.merged()
        transfer = self._carrier.submit(op, peer, merged)
        self._counts["transfers"] += 1
        self._counts["descriptors_asked"] += len(ranges)
        self._counts["descriptors_merged"] += len(merged)
        transfer.done.add_done_callback(self._account)
        self._start()
        self._wake()
        return transfer

    async def write(
        self, peer: str, local: Ints, remote: Ints, sizes: Ints | int, timeout_s: float
    ) -> None:
        """Copy local ranges into the peer's memory. On return its memory holds the bytes.

        Raises:
            TransferError: see ``Transfer.wait``; the target's bytes are undefined then.
        """
        await self.submit(Op.WRITE, peer, local, remote, sizes).wait(timeout_s)

    async def read(
        self, peer: str, local: Ints, remote: Ints, sizes: Ints | int, timeout_s: float
    ) -> None:
        """Copy ranges of the peer's memory here.

        Raises:
            TransferError: see ``Transfer.wait``; the target's bytes are undefined then.
        """
        await self.submit(Op.READ, peer, local, remote, sizes).wait(timeout_s)

    async def drain(self, quiet_s: float = 0.25) -> None:
        """Serve connections for ``quiet_s`` seconds, so that nothing a lost peer has sent is
        still waiting to be written into this side's memory.

        A process that dies, or loses its connection, in the middle of a WRITE leaves bytes in
        the socket buffers of this machine. They land in our memory when we next look at the
        connection, up to megabytes of them. Call this after a peer is known to be dead, or has
        given a write up, and before its targets are given to anybody else.
        """
        self._check_thread()
        end = time.monotonic() + quiet_s
        while not self._closed:
            self._carrier.work()
            if time.monotonic() >= end:
                return
            await asyncio.sleep(0.002)

    # ---- state --------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Transfers that are not settled."""
        return len(self._carrier.unsettled())

    def counters(self) -> dict[str, float]:
        """Totals since the start: ``write_bytes``, ``read_bytes`` (completed pieces),
        ``transfers``, ``descriptors_asked``, ``descriptors_merged``, ``pieces``, ``failures``
        (timeouts included), ``timeouts``, ``connections_lost``, ``reads_served``,
        ``pieces_of_unknown_fate``, ``ticks`` (times this agent looked after its transfers)."""
        return {name: float(value) for name, value in self._counts.items()}

    # ---- the engine room: one tick does everything --------------------------------------------

    def _start(self) -> None:
        if self._loop is None and not self._closed:
            self._loop = asyncio.get_running_loop()
            for fd in self._endpoint.ready_fds:
                self._loop.add_reader(fd, self._on_ready)
            self._wake()

    def _on_ready(self) -> None:
        spare = self._last_tick + _MIN_SPACING_S - time.monotonic()
        if spare > 0:
            time.sleep(spare)
        self._tick()

    def _wake(self) -> None:
        if self._loop is not None and not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        if self._closed or self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._counts["ticks"] += 1
        try:
            self._carrier.work()
        finally:
            # Also after a bug above (which the loop reports): peers must be served, and what is
            # under way must be able to settle.
            self._last_tick = time.monotonic()
            self._schedule(self._last_tick)

    def _schedule(self, now: float) -> None:
        assert self._loop is not None
        busy = self._carrier.busy
        since = now - self._carrier.last_event_s
        if busy and not self._event_driven and since < 0.001:
            # The loop's own timers have a resolution of a millisecond.
            time.sleep(50e-6)
            self._timer = self._loop.call_soon(self._tick)
            return
        if busy and (since < 0.02 or not self._event_driven):
            delay = 0.001 if since < 0.1 else 0.01
        elif self._event_driven:
            delay = 0.05
        else:
            delay = 0.001 if self._passive else 0.01
        self._timer = self._loop.call_later(min(delay, self._carrier.post_in_s(now)), self._tick)

    def _account(self, done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._counts["failures"] += 1
            self._counts["timeouts"] += isinstance(error, TransferTimeout)

    # ---- ending -------------------------------------------------------------------------------

    async def close(self, grace_s: float = 1.0) -> None:
        """Fail what is queued, wait up to ``grace_s`` for what is under way, destroy the agent.
        After it nothing touches this side's memory, and every transfer is settled. Idempotent."""
        self._check_thread()
        if self._closed:
            return
        error = AgentClosed(f"{self.name} was closed")
        for transfer in self._carrier.unsettled():
            transfer.give_up(error)
        under_way = [transfer.settled for transfer in self._carrier.unsettled()]
        if under_way:
            await asyncio.wait(under_way, timeout=grace_s)
        self._closed = True
        if self._loop is not None:
            for fd in self._endpoint.ready_fds:
                self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        self._carrier.close(error)
        self._regions.clear()

    async def __aenter__(self) -> PeerAgent:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"{self.name} belongs to another thread")


__all__ = ["Op", "PeerAgent", "Transfer"]
