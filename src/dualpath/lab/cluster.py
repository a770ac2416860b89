"""The lab with front and engines, ready to serve and to be measured."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dualpath import config as cluster
from dualpath.config import ClusterConfig, Mode, Role, engine_name
from dualpath.engine.program import engine_argv
from dualpath.lab import names
from dualpath.lab.describe import API_PORT, cluster_of
from dualpath.lab.names import FRONT
from dualpath.lab.network import LabError, LabNetwork, Say, lab_network
from dualpath.lab.spec import LabSpec
from dualpath.serve.local import CONFIG_FILE, answers, write_private
from dualpath.serve.supervise import ChildSpec, Listener, RestartPolicy, Supervisor
from dualpath.storage.paths import BLOCKS_DIR
from dualpath.workload import RequestFailed
from dualpath.workload.client import Endpoint
from dualpath.workload.front import STATE_PATH

_STATE_S: Final = 10.0
_DRAIN_S: Final = 120.0
_FILES_S: Final = 120.0
_STEP_S: Final = 0.3
_MOVED: Final = ("_bytes", "_blocks")
"""Counters that stand still in an engine without work; some others, of its loop, never do."""
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")

IsReady = Callable[[], Awaitable[bool]]
T = TypeVar("T")


class Lab:
    """A running cluster on the lab's hosts; made by ``lab_cluster``. Belongs to one event loop.

    Attributes:
        network: the hosts, and what their NICs count.
        front_url: of the API, reached from this machine.
        admin_key: bearer token for the front's state and administration.
        mode: how KV is loaded now.
        config: the cluster as its processes read it.
        config_file: where.
    """

    def __init__(self, network: LabNetwork, listener: Listener | None) -> None:
        """Use ``lab_cluster``."""
        self.network = network
        self.front_url = f"http://{names.FRONT_API_HOST}:{API_PORT}"
        self.admin_key = secrets.token_hex(16)
        self.mode = network.spec.mode
        self.config: ClusterConfig = cluster_of(network.spec, self.admin_key)
        self.config_file = network.run_dir / CONFIG_FILE
        self._listener = listener
        self._endpoint = Endpoint(self.front_url, self.admin_key)
        self._processes = contextlib.AsyncExitStack()

    @property
    def spec(self) -> LabSpec:
        """What was asked for."""
        return self.network.spec

    # ---- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start front and engines in ``mode``; returns when requests can be served.

        Raises:
            StartFailed: one of them did not start.
        """
        self.config = msgspec.structs.replace(self.config, mode=self.mode)
        write_private(self.config_file, cluster.dump(self.config))
        await self._processes.enter_async_context(self._endpoint)
        policy = RestartPolicy(drain_s=self.config.timeouts.drain)
        # Left in reverse order: the engines go first, whose front has nothing under way.
        for specs in ([self._front()], [*self._engines()]):
            supervisor = await self._processes.enter_async_context(
                Supervisor(specs, policy, self._listener)
            )
            await supervisor.start()

    async def stop(self) -> None:
        """Stop engines and front."""
        await self._processes.aclose()

    def _front(self) -> ChildSpec:
        argv = [sys.executable, "-m", "dualpath.cli.main", "serve"]
        argv += ["--config", str(self.config_file)]

        async def is_ready() -> bool:
            return await answers(f"{self.front_url}/health")

        return self._child(FRONT, argv, is_ready)

    def _engines(self) -> list[ChildSpec]:
        return [
            self._engine(role, rank)
            for role in Role
            for rank in range(len(self.config.engines(role)))
        ]

    def _engine(self, role: Role, rank: int) -> ChildSpec:
        name = engine_name(role, rank)
        argv = engine_argv(self.config_file, self.network.run_dir / name, role, rank)

        async def is_ready() -> bool:
            try:
                engines = (await self.state())["engines"]
            except (RequestFailed, LabError):
                return False  # not yet, whatever the reason: the caller has a deadline
            return any(one["name"] == name and one["usable"] for one in engines)

        return self._child(name, argv, is_ready)

    def _child(self, host: str, argv: list[str], is_ready: IsReady) -> ChildSpec:
        log = self.network.run_dir / f"{host}.log"
        return ChildSpec(host, self.network.command(host, argv), log, is_ready)

    # ---- looking -----------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """What the front says about everything (``/debug/state``).

        Raises:
            RequestFailed: it does not answer.
            LabError: it answers with an error.
        """
        status, body = await self._endpoint.get(STATE_PATH, _STATE_S)
        if status != 200:
            raise LabError(f"{self.front_url}{STATE_PATH} answers HTTP {status}: {body[:200]!r}")
        return msgspec.json.decode(body, type=dict[str, Any])

    async def engine_counters(self) -> dict[str, dict[str, float]]:
        """Totals of each engine by its name: ``storage_read_bytes``, ``push_hit_bytes``, ...

        Raises:
            RequestFailed: the front does not answer.
        """
        engines = (await self.state())["engines"]
        return {one["name"]: one["stats"]["counters"] for one in engines}

    async def drained(self, within_s: float = _DRAIN_S) -> None:
        """Return when nothing is under way: no request, session, transfer or write, and all
        totals of bytes and blocks stand still.

        Raises:
            LabError: that takes too long.
            RequestFailed: the front does not answer.
        """
        deadline_s = time.monotonic() + within_s
        before = None
        while True:
            state = await self.state()
            busy = state["requests_open"] or state["sessions_closing"] or any(
                one["open_sessions"] or one["stats"]["transfers"] for one in state["engines"]
            )  # fmt: skip
            now = {
                (one["name"], name): value
                for one in state["engines"]
                for name, value in one["stats"]["counters"].items()
                if name.endswith(_MOVED)
            }
            if not busy and now == before:
                return
            if time.monotonic() >= deadline_s:
                raise LabError(f"the lab is not drained after {within_s:g} s")
            before = now
            await asyncio.sleep(_STEP_S)

    # ---- changing ----------------------------------------------------------------------------

    async def set_mode(self, mode: Mode, policy: str = "") -> None:
        """Load KV in another way from now on, with the mode's own policies or those called
        ``policy``. Waits until nothing is under way. Engines are restarted only where their memory
        is laid out for layers in turn, or must be.

        Raises:
            LabError: the front refuses, or is not drained in time.
            StartFailed: an engine did not start again.
        """
        await self.drained()
        started_basic = self.config.mode is Mode.BASIC
        if self.spec.layer_aliasing and started_basic is not (mode is Mode.BASIC):
            await self.stop()
            self.mode = mode
            await self.start()
        await self._post("/admin/mode", {"mode": mode.value, "policy": policy})
        self.mode = mode

    async def fresh_store(self) -> None:
        """Nothing that is stored can be hit from now on, and no cache holds any of it. Waits until
        nothing is under way.

        The weight epoch is advanced, which makes all blocks unreachable and the front's index
        empty; then the storage host removes them, past all SNICs.

        Raises:
            LabError: the front refuses, is not drained in time, or files cannot be removed.
            RequestFailed: the front does not answer.
        """
        await self.drained()
        blocks = self.network.storage_view() / names.KV_STORE / BLOCKS_DIR
        old = await self._of_files(lambda: list(blocks.iterdir()))
        await self._post("/admin/weights/advance", {"in_place": False})
        for folder in old:
            await self._of_files(partial(shutil.rmtree, folder))
        await self.drop_caches()

    async def drop_caches(self) -> None:
        """No host's memory holds what is stored.

        Raises:
            LabError: the kernel does not allow it.
        """
        await self._of_files(partial(_DROP_CACHES.write_text, "3"))

    async def _of_files(self, work: Callable[[], T]) -> T:
        """In a thread. When it hangs, removing the hosts ends it: their file system is killed."""
        try:
            async with asyncio.timeout(_FILES_S):
                return await asyncio.to_thread(work)
        except OSError as error:  # TimeoutError is one, and says nothing
            what = error if error.strerror else f"not done within {_FILES_S:g} s"
            raise LabError(f"files of the lab's store: {what}") from None

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self._endpoint.post(path, body, _STATE_S)
        if status != 200:
            raise LabError(f"{self.front_url}{path} answers HTTP {status}: {answer[:300]!r}")


@contextlib.asynccontextmanager
async def lab_cluster(
    spec: LabSpec, run_dir: Path, listener: Listener | None = None, say: Say | None = None
) -> AsyncIterator[Lab]:
    """Run a lab for the time of the block; ready to serve when it begins. Blocks the loop for some
    seconds while the hosts are made.

    Args:
        run_dir: for logs and the cluster file.
        listener: told of every change of the front and the engines.
        say: told what is done before they start.

    Raises:
        ConfigError: this machine cannot have a lab, or has one already.
        LabError: its hosts could not be made.
        StartFailed: the front or an engine did not start.
    """
    with lab_network(spec, run_dir, say) as network:
        lab = Lab(network, listener)
        try:
            await lab.start()
            yield lab
        finally:
            await lab.stop()
