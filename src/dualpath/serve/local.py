"""A whole cluster on this machine: the front in this process, every engine a child process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
import msgspec

from dualpath.config import ClusterConfig, ConfigError, Role, dump, engine_name
from dualpath.serve import serve
from dualpath.serve.ports import free_ports, is_free
from dualpath.serve.supervise import ChildSpec, Listener, RestartPolicy, StartFailed, Supervisor
from dualpath.serve.thresholds import read_profile
from dualpath.storage import StoreError

CONFIG_FILE: Final = "cluster.toml"
_SECRET_FILE: Final = "control.secret"
_LOCK_FILE: Final = "lock"
_HTTP_S: Final = 5.0
_JOIN_S: Final = 60.0
_JOIN_POLL_S: Final = 0.1
_STOP_SLACK_S: Final = 10.0
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ClusterFailed(RuntimeError):
    """The cluster did not come up, or its front ended while it was to run."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster that runs.

    Attributes:
        url: of the front, as a client uses it.
        config: the description with every port and path filled in.
        supervisor: the engines' processes.
        front: done when the front has ended.
    """

    url: str
    config: ClusterConfig
    supervisor: Supervisor
    front: asyncio.Task[None]


@contextlib.asynccontextmanager
async def local_cluster(
    config: ClusterConfig,
    run_dir: Path,
    engine_argv: Callable[[Path, Path, Role, int], Sequence[str]],
    listener: Listener | None = None,
) -> AsyncIterator[LocalCluster]:
    """Run a cluster for the time of the block.

    On leaving, the front stops taking requests and finishes those it has (``timeouts.drain``), then
    the engines are stopped. Nothing of it runs afterwards.

    Args:
        config: the cluster; open ports are chosen.
        run_dir: for logs, the resolved configuration and NIC limits; made when missing, one
            cluster at a time.
        engine_argv: program of an engine, from configuration file, run folder, role and rank.
        listener: told of every engine's changes.

    Raises:
        ConfigError: an address cannot be used, or another cluster runs in ``run_dir``.
        StartFailed: an engine did not start.
        ClusterFailed: the front did not start or the engines did not join it.
    """
    with _held(run_dir) as run_dir:
        config, config_file = _settled(config, run_dir)
        async with contextlib.AsyncExitStack() as stack:
            front = _Front(config)
            specs = [
                _engine_spec(
                    config, role, rank, engine_argv(config_file, run_dir, role, rank), run_dir
                )
                for role in Role
                for rank in range(len(config.engines(role)))
            ]
            policy = RestartPolicy(drain_s=config.timeouts.drain)
            # Left in reverse order: the front drains while its engines still run.
            supervisor = await stack.enter_async_context(Supervisor(specs, policy, listener))
            stack.push_async_callback(front.stop)
            url = await front.start()
            await front.while_running(supervisor.start())
            await front.while_running(_joined(url))
            yield LocalCluster(url, config, supervisor, front.task)


def resolve(config: ClusterConfig) -> ClusterConfig:
    """The description with absolute paths and every open port chosen.

    Raises:
        ConfigError: a host is not of this machine, a given port is in use, or the profile cannot
            be read.
    """
    taken: set[int] = set()

    def settle(field: str, host: str, port: int, count: int = 1) -> int:
        try:
            if port == 0:
                ports = free_ports(host, count, frozenset(taken))
            else:
                ports = list(range(port, port + count))
                for used in ports:
                    if used in taken or not is_free(host, used):
                        raise ConfigError(
                            f"{field}: port {used} of {host} is in use; "
                            "choose another, or 0 for any free one"
                        )
        except OSError as error:
            raise ConfigError(
                f"{field}: {host} cannot be used here: {error.strerror}; "
                "'dualpath up' runs every node on this machine"
            ) from None
        taken.update(ports)
        return ports[0]

    front = config.front
    front = msgspec.structs.replace(
        front,
        port=settle("front.port", front.host, front.port),
        control_port=settle("front.control_port", front.control_host, front.control_port),
    )
    nodes = tuple(
        msgspec.structs.replace(
            node, base_port=settle(f"nodes.{node.name}", node.host, node.base_port, node.engines)
        )
        for node in config.nodes
    )
    model = config.model
    if Path(model.path).is_dir():
        model = msgspec.structs.replace(model, path=str(Path(model.path).absolute()))
    storage = config.storage
    if not storage.in_bucket:
        store = str(Path(storage.path).expanduser().absolute())
        storage = msgspec.structs.replace(storage, path=store)
    read_profile(config.scheduler)  # before anything is started
    scheduler = msgspec.structs.replace(
        config.scheduler,
        profile=_absolute(config.scheduler.profile),
        decision_log=_absolute(config.scheduler.decision_log),
    )
    log = msgspec.structs.replace(config.log, timeline=_absolute(config.log.timeline))
    return msgspec.structs.replace(
        config, front=front, nodes=nodes, model=model, storage=storage, scheduler=scheduler, log=log
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


class _Front:
    """The front as a task of this loop."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None]

    async def start(self) -> str:
        """Listen; the URL."""
        self.task = asyncio.create_task(
            serve(self._config, ready=self._listening, stop=self._stop), name="front"
        )
        return await self.while_running(_of(self._url))

    async def while_running(self, awaitable: Awaitable[T]) -> T:
        """Await something that makes sense only while the front runs.

        Raises:
            ClusterFailed: the front ended first.
            ConfigError: it ended because of what the description says.
        """
        other = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait([other, self.task], return_when=asyncio.FIRST_COMPLETED)
            if other.done():
                return other.result()
            if not self.task.cancelled() and isinstance(self.task.exception(), ConfigError):
                self.task.result()
            raise ClusterFailed(f"the front ended: {_reason(self.task)}")
        finally:
            other.cancel()

    async def stop(self) -> None:
        """Drain and end; cancelled when it takes longer than it may."""
        if not hasattr(self, "task"):
            return
        self._stop.set()
        limit_s = self._config.timeouts.drain + _STOP_SLACK_S
        done, _ = await asyncio.wait([self.task], timeout=limit_s)
        if not done:
            logger.error("the front did not stop within %g s: cancelled", limit_s)
            self.task.cancel()
            await asyncio.wait([self.task], timeout=_STOP_SLACK_S)
        elif not self.task.cancelled() and (error := self.task.exception()) is not None:
            # Why it did not start, where it is no fault of ours, ``start`` has raised in one line.
            refused = isinstance(error, ConfigError | StoreError | OSError)
            listened = self._url.done() and not self._url.cancelled()
            if listened or not refused:
                logger.error("the front ended with an error", exc_info=error)

    def _listening(self, url: str) -> None:
        if not self._url.done():
            self._url.set_result(url)


async def _of(future: asyncio.Future[T]) -> T:
    return await future


def _reason(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return "without being told to" if error is None else f"{type(error).__name__}: {error}"


def _engine_spec(
    config: ClusterConfig, role: Role, rank: int, argv: Sequence[str], run_dir: Path
) -> ChildSpec:
    node, local = config.engines(role)[rank]
    host = _ANYWHERE.get(node.host, node.host)
    url = f"http://{_bracketed(host)}:{node.base_port + local}/health"
    name = engine_name(role, rank)

    async def is_ready() -> bool:
        return await answers(url)

    return ChildSpec(name=name, argv=argv, log=run_dir / f"{name}.log", is_ready=is_ready)


async def answers(url: str, timeout_s: float = _HTTP_S) -> bool:
    """Whether a GET gives 200. Nothing secret is sent, and a certificate is made for a name, not
    for the loopback address asked here: it is not checked."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, ssl=False) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False  # not yet, whatever the reason: the caller has a deadline


async def _joined(url: str) -> None:
    """Wait until the front has its engines.

    Raises:
        ClusterFailed: it does not get them.
    """
    try:
        async with asyncio.timeout(_JOIN_S):
            while not await answers(f"{url}/ready"):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(_JOIN_POLL_S)
    except TimeoutError:
        raise ClusterFailed(
            f"the engines answer, but the front has none of one role after {_JOIN_S:.0f} s; "
            "their logs say why"
        ) from None


def _settled(config: ClusterConfig, run_dir: Path) -> tuple[ClusterConfig, Path]:
    """The resolved description, and the file in ``run_dir`` that holds it for the engines."""
    config = _with_secret(resolve(config), run_dir)
    if not config.storage.in_bucket:
        try:
            Path(config.storage.path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"storage.path: {config.storage.path} cannot be made: {error.strerror}"
            ) from None
    file = run_dir / CONFIG_FILE
    write_private(file, dump(config))  # it may hold API keys
    return config, file


def write_private(path: Path, text: str) -> None:
    """A new file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(text)


def _with_secret(config: ClusterConfig, run_dir: Path) -> ClusterConfig:
    """Engines of this cluster only: other users of the machine reach loopback too."""
    if config.security.control_secret_file:
        return config
    path = run_dir / _SECRET_FILE
    write_private(path, secrets.token_hex(32))
    security = msgspec.structs.replace(config.security, control_secret_file=str(path))
    return msgspec.structs.replace(config, security=security)


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[Path]:
    """One cluster a run folder: two would mix logs and share NIC limits. Yields its full path."""
    run_dir = run_dir.absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / _LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be used: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--run-dir: another cluster runs from {run_dir}; stop it or name another folder"
            ) from None
        yield run_dir


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


__all__ = [
    "ClusterFailed", "LocalCluster", "StartFailed", "answers", "local_cluster", "resolve",
]  # fmt: skip
