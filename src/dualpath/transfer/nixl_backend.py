"""One NIXL agent with one UCX backend: synchronous calls and what their answers mean.

Every call may run UCX's progress engine, so a call can take as long as copying what is ready
(milliseconds for megabytes). NIXL releases the interpreter lock in its calls. Nothing here is
thread safe: the agent is made without NIXL's own locking.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dualpath.storage.nixl_module import Nixl, find_nixl
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.errors import AgentSetupError, NixlMissing, PeerLost, TransferFailed
from dualpath.transfer.listening import has_free_port
from dualpath.transfer.memory import Region
from dualpath.transfer.qos.classes import Marks

logger = logging.getLogger(__name__)

_BACKEND: Final = "UCX"
_HOST: Final = ("DRAM", 0)


class Op(enum.Enum):
    """Direction, seen from the side that submits."""

    WRITE = "WRITE"
    READ = "READ"


class State(enum.Enum):
    """What NIXL says about a posted request.

    DONE: the bytes are at the destination; for a WRITE the peer's memory holds them (UCX's flush
    was answered), for a READ ours does. LOST: the connection broke. FAILED: anything else.
    """

    ACTIVE = "active"
    DONE = "done"
    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """How UCX reaches peers.

    Attributes:
        device: UCX's name of the NIC: an interface for TCP, ``mlx5_0:1`` for RDMA; empty for all.
        ports: ``low-high`` TCP ports; empty for any.
        transports: one name of UCX's, e.g. ``tcp`` or ``all``; empty for TCP, or for UCX's choice
            on an RDMA device. Not a list: NIXL's configuration text cannot carry its commas, and
            drops what follows one without a word.
        user_timeout_s: a TCP connection on which nothing was accepted for so long is broken.
        service_level, traffic_class: marks of the agent's traffic class, see ``qos.classes``; NIXL
            has no priority of a transfer, so each class of a NIC needs an agent of its own.

    Raises:
        ValueError: ``device`` or ``transports`` is a list.
    """

    device: str = ""
    ports: str = ""
    transports: str = ""
    user_timeout_s: float = 10.0
    service_level: int | None = None
    traffic_class: int | None = None

    def __post_init__(self) -> None:
        for field in ("device", "transports"):
            if "," in getattr(self, field):
                raise ValueError(f"{field} must be one name, got {getattr(self, field)!r}")

    @property
    def rdma(self) -> bool:
        """UCX names RDMA devices with a port number after a colon."""
        return ":" in self.device

    @property
    def effective_transports(self) -> str:
        """TCP unless told otherwise. ``all`` would let processes of one machine copy each other's
        memory directly, past the NIC and its rate; and nothing would wake us when something
        lies in UCX's shared-memory queues."""
        return self.transports or ("" if self.rdma else "tcp")

    @property
    def event_driven(self) -> bool:
        """Whether file descriptors tell about everything: TCP does, without arming."""
        return self.effective_transports == "tcp"

    def engine_config(self) -> str:
        """UCX configuration for NIXL's UCX backend, ``KEY=value,...``."""
        items = [f"TCP_USER_TIMEOUT={self.user_timeout_s:g}s"]
        if transports := self.effective_transports:
            items.append(f"TLS={transports}")
        if self.device:
            items.append(f"NET_DEVICES={self.device}")
        marks = Marks(self.ports, self.service_level, self.traffic_class)
        items += [f"{name}={value}" for name, value in marks.ucx_settings().items()]
        return ",".join(items)


class NixlEndpoint:
    """A NIXL agent. See the module's text for threading.

    Args:
        name: unique in the cluster and per start.

    Raises:
        NixlMissing: not installed.
        AgentSetupError: the settings do not work here (no such device, ports taken).
    """

    def __init__(self, name: str, settings: UcxSettings) -> None:
        if settings.event_driven:
            # UCX loads its RDMA modules whatever transport is asked for. Their bundled libraries
            # meet the system's rdma-core (where it is installed) and crash the process at exit.
            os.environ.setdefault("UCX_MODULES", "^ib")
        nixl = find_nixl()
        if nixl is None:
            raise NixlMissing("no NIXL package can be imported; install the serve extras")
        self.name = name
        self._nixl: Nixl = nixl
        self._lost: type[Exception] = nixl.api.nixlBind.nixlRemoteDisconnectError
        self._registered: list[Any] = []
        self._on_device: list[Region] = []
        self.native_reads = settings.rdma and not settings.event_driven
        """Whether the NIC itself can READ; see ``reads`` for what is done otherwise."""
        if not settings.rdma and not has_free_port(settings.ports, settings.device):
            raise AgentSetupError(
                f"all TCP ports {settings.ports} are taken; each engine of a node needs one: widen "
                "fabric.kv.ports or nodes.cnic.ports"
            )
        before = _event_polls()
        try:
            config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = nixl.api.nixl_agent(name, config)
            self._agent.create_backend(_BACKEND, {"engine_config": settings.engine_config()})
        except nixl.errors as error:
            raise AgentSetupError(
                f"UCX does not start with {settings.engine_config()}: {error!r}"
            ) from error
        self.ready_fds: Sequence[int] = sorted(_event_polls() - before)
        """UCX's own epoll descriptors. They turn readable when a connection has something for
        ``progress``; empty where they cannot be told, and then only polling helps."""

    def register(self, region: Region) -> None:
        """Make memory usable in transfers, ours or a peer's. Keep it mapped until ``close``.

        Raises:
            AgentSetupError: NIXL refuses the memory.
        """
        kind, device = _HOST if region.device is None else ("VRAM", region.device)
        rows = [(region.address, region.nbytes, device, "")]
        try:
            self._registered.append(self._agent.register_memory(rows, kind))
        except self._nixl.errors as error:
            raise AgentSetupError(
                f"{region.nbytes} bytes at {region.address:#x} cannot be registered: {error!r}"
            ) from error
        if region.device is not None:
            self._on_device.append(region)

    def _memory(self, address: int) -> tuple[str, int]:
        """NIXL's kind of our memory at an address, and the GPU's number."""
        for region in self._on_device:
            if region.contains(address, 1):
                assert region.device is not None
                return "VRAM", region.device
        return _HOST

    def metadata(self) -> bytes:
        """Connection data and registered memory, for peers."""
        return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """Load a peer's metadata; connects at the first transfer. Returns the peer's name.

        Raises:
            PeerLost: it is not usable metadata, or an agent of that name is loaded already.
        """
        try:
            remote = self._agent.add_remote_agent(metadata)
        except self._nixl.errors as error:
            raise PeerLost(f"metadata is not usable: {error!r}") from error
        return remote.decode() if isinstance(remote, bytes) else str(remote)

    def remove(self, remote: str) -> None:
        """Forget a peer. Only when no request to it is under way: NIXL then says nothing more
        about those, while UCX still carries them out."""
        try:
            self._agent.remove_remote_agent(remote)
        except self._nixl.errors as error:
            logger.warning("%s: peer %s could not be removed: %r", self.name, remote, error)

    def prepare(self, op: Op, remote: str, ranges: Descriptors) -> Any:
        """A request that can be posted. All ranges of a side are in one kind of memory: the
        host's or one GPU's. A peer's is the host's; ``remote`` may be this agent itself.

        Raises:
            PeerLost: the peer is not loaded or its connection broke.
            TransferFailed: a range is not registered on either side.
        """
        agent = self._agent
        ours, our_device = self._memory(int(ranges.local[0]))
        theirs, their_device = self._memory(int(ranges.remote[0])) if remote == self.name else _HOST
        try:
            return agent.initialize_xfer(
                op.value,
                agent.get_xfer_descs(ranges.rows(remote=False, device=our_device), ours),
                agent.get_xfer_descs(ranges.rows(remote=True, device=their_device), theirs),
                remote,
            )
        except self._lost as error:
            raise PeerLost(f"{remote}: {error!r}") from error
        except self._nixl.errors as error:
            raise TransferFailed(f"{op.value} {remote}: not accepted: {error!r}") from error

    def post(self, handle: Any) -> State:
        """Start a request."""
        return self._state(self._agent.transfer, handle)

    def check(self, handle: Any) -> State:
        """Ask about a posted request, and progress all."""
        return self._state(self._agent.check_xfer_state, handle)

    def _state(self, call: Any, handle: Any) -> State:
        try:
            answer = call(handle)
        except self._lost:
            return State.LOST
        except self._nixl.errors as error:
            logger.error("%s: a transfer failed: %r", self.name, error)
            return State.FAILED
        return {"DONE": State.DONE, "PROC": State.ACTIVE}.get(answer, State.FAILED)

    def release(self, handle: Any) -> None:
        """Free a request that is over (never one under way: UCX would go on with it unseen)."""
        try:
            handle.release()
        except self._nixl.errors as error:
            logger.warning("%s: a handle could not be released: %r", self.name, error)

    def notify(self, remote: str, message: bytes) -> State:
        """Send a small message. ACTIVE: it is on its way."""
        try:
            self._agent.send_notif(remote, message)
        except self._lost:
            return State.LOST
        except self._nixl.errors as error:
            logger.error("%s: a message to %s failed: %r", self.name, remote, error)
            return State.FAILED
        return State.ACTIVE

    def progress(self) -> list[tuple[str, bytes]]:
        """Serve peers: take in what they wrote, send what they read.

        Returns:
            Messages that came: sender's name, text.
        """
        received: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [(sender, message) for sender, texts in received.items() for message in texts]

    def close(self) -> None:
        """Destroy the agent. No transfer touches this side's memory after it. Requests must have
        been released: each refers to the agent."""
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except self._nixl.errors as error:
                logger.warning("%s: memory could not be deregistered: %r", self.name, error)
        self._registered.clear()
        # There is no call that ends an agent: it goes with its last reference. Tracebacks of kept
        # exceptions may still refer to the wrapper, so what it wraps is taken out of it.
        self._agent.agent = None
        self._agent = None


def _event_polls() -> set[int]:
    """This process's epoll descriptors."""
    found: set[int] = set()
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return found
    for entry in folder.iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # the descriptor of the listing itself, or one closed meanwhile
        if target == "anon_inode:[eventpoll]":
            found.add(int(entry.name))
    return found
