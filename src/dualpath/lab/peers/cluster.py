"""A peer that runs on the lab's hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dualpath.config import Role
from dualpath.engine import launch
from dualpath.lab import inside, names
from dualpath.lab.describe import API_PORT, cluster_of
from dualpath.lab.names import FRONT, STORAGE, Net
from dualpath.lab.network import LabError, LabNetwork
from dualpath.lab.peers import commands, packages
from dualpath.lab.peers.commands import Place, Pool
from dualpath.lab.peers.kinds import Peer
from dualpath.report.lab.results import write
from dualpath.serve.local import answers
from dualpath.serve.supervise import ChildSpec, Listener, RestartPolicy, Supervisor
from dualpath.workload.client import Endpoint

_POOL_BYTES: Final = 2 << 30
_POOL_FILE: Final = "mooncake.json"
_CONNECT_S: Final = 1.0
_HTTP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class PeerLab:
    """A peer, ready to serve.

    Attributes:
        network: its hosts.
        url: of its router, reached from this machine.
    """

    network: LabNetwork
    url: str

    async def state(self) -> dict[str, Any]:
        """As a front of ours tells it, as far as a peer can: no engine reports its queues."""
        return {"engines": []}

    async def forget(self) -> None:
        """From now on nothing is hit that was computed before.

        Raises:
            LabError: the router refuses.
            RequestFailed: it does not answer.
        """
        async with Endpoint(self.url) as endpoint:
            status, body = await endpoint.post("/forget", {}, _HTTP_S)
        if status != 200:
            raise LabError(f"{self.url}/forget answers HTTP {status}: {body[:200]!r}")


@contextlib.asynccontextmanager
async def peer_cluster(
    peer: Peer, network: LabNetwork, listener: Listener | None = None
) -> AsyncIterator[PeerLab]:
    """Run a peer's processes in the hosts for the time of the block.

    Args:
        network: hosts in which nothing else serves; logs go to its ``run_dir``.
        listener: told of every process's changes.

    Raises:
        NotInstalled: the peer's packages cannot be had.
        StartFailed: a process did not start.
        NoEngine: there is no vLLM.
    """
    folder = await asyncio.to_thread(packages.ensure, peer)
    plan = PeerPlan(peer, network, folder)
    async with peer_store(plan, listener):
        specs = [*plan.engines(), plan.router()]
        async with Supervisor(specs, plan.policy(), listener) as supervisor:
            await supervisor.start()
            yield PeerLab(network, plan.url)


@contextlib.asynccontextmanager
async def peer_store(plan: PeerPlan, listener: Listener | None = None) -> AsyncIterator[None]:
    """Run what a peer needs on the storage host for the time of the block: nothing but for
    Mooncake.

    Raises:
        StartFailed: a process did not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        for spec in plan.store():  # the second needs the first
            supervisor = Supervisor([spec], plan.policy(), listener)
            await stack.enter_async_context(supervisor)
            await supervisor.start()
        yield


class PeerPlan:
    """The peer's processes and where they run."""

    def __init__(self, peer: Peer, network: LabNetwork, folder: Path) -> None:
        """``folder``: the peer's packages."""
        self.config = cluster_of(network.spec)
        self.url = f"http://{names.FRONT_API_HOST}:{API_PORT}"
        self._peer = peer
        self._network = network
        self._packages = folder
        self._device = launch.installed_device()
        host = network.address(STORAGE, Net.STORAGE)
        self._pool = Pool(host, network.run_dir / _POOL_FILE, _POOL_BYTES)

    def policy(self) -> RestartPolicy:
        """How its processes are kept running."""
        return RestartPolicy(drain_s=self.config.timeouts.drain)

    def store(self) -> list[ChildSpec]:
        """Mooncake's master, then its memory; nothing for peers without a store."""
        if self._peer is not Peer.MOONCAKE_STORE:
            return []
        write(self._pool.config_file, commands.pool_config(self._pool))
        master = commands.master_argv(self._packages, self._pool)
        pool = commands.pool_argv(self._packages, self._pool)
        return [
            self._stored("master", master, commands.MASTER_PORT),
            self._stored("pool", pool, commands.POOL_PORT),
        ]

    def _stored(self, name: str, argv: list[str], port: int) -> ChildSpec:
        async def is_ready() -> bool:
            return await asyncio.to_thread(_listens, STORAGE, self._pool.host, port)

        return self._child(name, STORAGE, launch.Command(tuple(argv), {}), is_ready)

    def engines(self) -> list[ChildSpec]:
        """All of them; ready together, because the router tells."""
        return [
            self._child(name, name, self._engine(role, name, rank), self._all_ready)
            for role in Role
            for rank, name in enumerate(self._network.spec.nodes(role))
        ]

    def _engine(self, role: Role, name: str, rank: int) -> launch.Command:
        place = Place(
            role,
            name,
            self._network.address(name),
            launch.http_port(self.config, role, rank),
            self._network.address(name, Net.STORAGE),
            self.config.fabric.kv.ports,
        )
        return commands.engine_command(
            self._peer,
            self.config,
            place,
            packages=self._packages,
            pool=self._pool,
            device=self._device,
            inherited=os.environ,
        )

    def router(self) -> ChildSpec:
        """What clients talk to."""
        listen = (names.FRONT_API_HOST, API_PORT)
        argv = commands.router_argv(
            self._peer, listen, self._urls(Role.PREFILL), self._urls(Role.DECODE)
        )
        return self._child("router", FRONT, launch.Command(tuple(argv), {}), self._all_ready)

    def _urls(self, role: Role) -> list[str]:
        return [
            f"http://{self._network.address(name)}:{launch.http_port(self.config, role, rank)}"
            for rank, name in enumerate(self._network.spec.nodes(role))
        ]

    async def _all_ready(self) -> bool:
        return await answers(f"{self.url}/health")

    def _child(
        self,
        name: str,
        host: str,
        command: launch.Command,
        is_ready: Callable[[], Awaitable[bool]],
    ) -> ChildSpec:
        log = self._network.run_dir / f"{name}.log"
        return ChildSpec(
            name, self._network.command(host, command.argv), log, is_ready, command.env
        )


def _listens(host: str, address: str, port: int) -> bool:
    """Whether a host's own process can be connected to."""

    def connect() -> None:
        socket.create_connection((address, port), _CONNECT_S).close()

    try:
        inside.call(host, connect)
    except OSError:
        return False  # not yet: the caller has a deadline
    return True
