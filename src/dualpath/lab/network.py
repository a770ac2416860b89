"""The lab without engines: hosts, NICs, traffic classes and the storage host's file system."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualpath.config import ConfigError
from dualpath.lab import counting, glusterfs, inside, links, names
from dualpath.lab.claim import claim
from dualpath.lab.counting import ClassBytes, NicBytes, NicCounters
from dualpath.lab.describe import cluster_of
from dualpath.lab.names import STORAGE, SWITCH, Host, Net
from dualpath.lab.removing import NotRemoved, remove_all
from dualpath.lab.spec import LabSpec
from dualpath.transfer.qos.system import ThisMachine, ToolFailed

_CLAIM_S: Final = 60.0
"""A lab whose process was killed is being removed by its keeper."""
_KEEPER_S: Final = 60.0
_CARRIER_S: Final = 20.0
_MOUNT_S: Final = 30.0
_STEP_S: Final = 0.05
_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux",
                 **dict.fromkeys(glusterfs.TOOLS, glusterfs.PACKAGES)}  # fmt: skip
_MACHINE: Final = ThisMachine()

Say = Callable[[str], None]


class LabError(RuntimeError):
    """The lab did not come up, or broke; one line says where to look."""


class FolderError(ConfigError):
    """The folder for logs cannot be used; which option named it, the command knows."""


@dataclass(frozen=True, slots=True)
class LabNetwork:
    """Hosts that can be used until the end of ``lab_network``'s block.

    Attributes:
        spec: what was asked for.
        run_dir: logs.
        hosts: by name: storage, front, and one for each engine.
    """

    spec: LabSpec
    run_dir: Path
    hosts: dict[str, Host]
    _counters: NicCounters

    @property
    def nodes(self) -> tuple[str, ...]:
        """The hosts of engines, prefill first."""
        return self.spec.engines

    def address(self, host: str, net: Net = Net.COMPUTE) -> str:
        """A host's address on a network."""
        return net.address(self.hosts[host].number)

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """``argv`` as it runs inside a host; see ``inside.command``."""
        return inside.command(host, argv)

    def nic_bytes(self) -> dict[str, dict[str, NicBytes]]:
        """What every device of every host counts, by host and device: ``sn0``, ``cn0``, ``lo``."""
        return self._counters.read()

    def class_bytes(self) -> dict[str, dict[str, ClassBytes]]:
        """What the classes of every engine's compute NIC have sent; see ``counting``.

        Raises:
            LabError: the kernel does not tell.
        """
        try:
            return {node: counting.class_bytes(node) for node in self.nodes}
        except ToolFailed as error:
            raise LabError(f"classes of the compute network: {error}") from None

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of the processes in each host now."""
        return {name: counting.cpu_s(name) for name in self.hosts}

    def storage_view(self) -> Path:
        """The storage host's own mount: what is done there passes no SNIC."""
        return self.hosts[STORAGE].mount_dir


def check_root() -> None:
    """Whether this process may have a lab.

    Raises:
        ConfigError: it is not root.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            "lab: needs root, for network namespaces, traffic classes and mounts: run it as root"
        )


def check_machine() -> None:
    """Whether a lab can be made here.

    Raises:
        ConfigError: not root, or a tool is missing.
    """
    check_root()
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None and shutil.which(tool, path="/usr/sbin:/sbin") is None:
            raise ConfigError(f"lab: {tool} is not installed: apt install {package}")
    if not Path("/dev/fuse").exists():
        raise ConfigError("lab: this kernel has no /dev/fuse, which the storage host's clients use")


@contextlib.contextmanager
def lab_network(spec: LabSpec, run_dir: Path, say: Say | None = None) -> Iterator[LabNetwork]:
    """Make the hosts for the time of the block. Blocks for a few seconds.

    Whatever becomes of this process, a process of its own (the keeper) removes all of it.

    Args:
        run_dir: for logs; made when missing.
        say: told what is done next.

    Raises:
        ConfigError: this machine cannot have a lab, or has one already.
        FolderError: ``run_dir`` cannot be used.
        LabError: something of it could not be made.
        NotRemoved: something is left at the end.
    """
    check_machine()
    say = say or (lambda _: None)
    run_dir = run_dir.absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{run_dir} cannot be used: {error.strerror}") from None
    config = cluster_of(spec)
    with _kept():
        remove_all()  # of a lab whose keeper was killed, too
        hosts = list(names.hosts(spec.engines))
        say(f"{len(hosts)} hosts")
        for command in (
            *links.namespaces(hosts),
            *links.cables(hosts),
            *links.limits(spec, config, hosts),
        ):
            try:
                _MACHINE.run(command)
            except ToolFailed as error:
                raise LabError(f"{links.shown(command)}: {error}") from None
        _await_carriers(hosts)
        say("file system")
        _serve(run_dir)
        for host in hosts:
            _mount(host, run_dir)
        counters = NicCounters(tuple(host.name for host in hosts))
        try:
            yield LabNetwork(spec, run_dir, {host.name: host for host in hosts}, counters)
        finally:
            counters.close()


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Claim the lab and have it removed at the end of the block or of this process."""
    with claim(_CLAIM_S) as held:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "dualpath.lab.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(held.fileno(),),
            start_new_session=True,
        )
        assert keeper.stdin is not None and keeper.stdout is not None
        spoke, _, _ = select.select([keeper.stdout], [], [], _KEEPER_S)
        if not spoke or keeper.stdout.readline().strip() != b"ready":
            keeper.kill()
            raise LabError(f"the keeper did not start: {_last_line(keeper.communicate()[1])}")
        try:
            yield
        finally:
            # Its end of file is what it waits for.
            try:
                _, said = keeper.communicate(timeout=_KEEPER_S)
            except subprocess.TimeoutExpired:
                raise NotRemoved(
                    f"the lab's keeper, process {keeper.pid}, is not done after {_KEEPER_S:g} s"
                ) from None
            if keeper.returncode:
                raise NotRemoved(_last_line(said))


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _await_carriers(hosts: list[Host]) -> None:
    """The kernel may tell a new cable's carrier a second late, and UCX takes no device without."""
    deadline_s = time.monotonic() + _CARRIER_S
    for inside_of in (*(host.namespace for host in hosts), names.namespace(SWITCH)):
        while True:
            try:
                shown = _MACHINE.run(["ip", "-n", inside_of, "-o", "link", "show"])
            except ToolFailed as error:
                raise LabError(f"{inside_of}: {error}") from None
            down = [line for line in shown.splitlines() if "state DOWN" in line]
            if not down:
                break
            if time.monotonic() >= deadline_s:
                raise LabError(f"{inside_of}: no carrier: {down[0].split(':')[1].strip()}")
            time.sleep(_STEP_S)


def _serve(run_dir: Path) -> None:
    address = glusterfs.storage_address()
    for folder in (names.RUN_DIR, names.STORE_DIR, names.BRICK_DIR):
        folder.mkdir(parents=True)
    for name, text in (
        ("server", glusterfs.server_description(address, names.BRICK_DIR)),
        ("client", glusterfs.client_description(address)),
    ):
        _description(name).write_text(text)
    log = _log(run_dir, STORAGE, "server")
    argv = inside.network_command(STORAGE, glusterfs.server_argv(_description("server"), log))
    try:
        _MACHINE.run(argv)
    except ToolFailed as error:
        raise LabError(f"the storage host: {error}; see {log}") from None


def _mount(host: Host, run_dir: Path) -> None:
    """Mount, and look into it: the client is in the background before it has a connection."""
    host.mount_dir.mkdir()
    log = _log(run_dir, host.name, "mount")
    argv = glusterfs.mount_argv(host, _description("client"), log)
    deadline_s = time.monotonic() + _MOUNT_S
    try:
        _MACHINE.run(inside.network_command(host.name, argv))
    except ToolFailed as error:
        raise LabError(f"{host.name}: {error}; see {log}") from None
    while True:
        try:
            # In a process of its own: a file system that does not answer must not hold us.
            _MACHINE.run(["stat", "-f", str(host.mount_dir)])
            return
        except ToolFailed as error:
            if time.monotonic() >= deadline_s:
                raise LabError(f"{host.name}: no file system: {error}; see {log}") from None
            time.sleep(_STEP_S)


def _description(name: str) -> Path:
    return names.RUN_DIR / f"{name}.vol"


def _log(run_dir: Path, host: str, what: str) -> Path:
    log = run_dir / "storage" / f"{host}-{what}.log"
    try:
        log.parent.mkdir(exist_ok=True)
        log.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(f"{log} cannot be written: {error.strerror}") from None
    return log


__all__ = [
    "FolderError", "LabError", "LabNetwork", "check_machine", "check_root", "lab_network",
]  # fmt: skip
