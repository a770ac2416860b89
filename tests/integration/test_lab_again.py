"""One process makes the lab's hosts again after a run that failed, as experiments do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from dualpath.config import ConfigError
from dualpath.lab import inside
from dualpath.lab.experiments import Experiment
from dualpath.lab.gathering import gathered
from dualpath.lab.names import namespace
from dualpath.lab.network import LabNetwork, check_machine, lab_network
from dualpath.lab.removing import leftovers
from dualpath.lab.replaying import RunFailed
from dualpath.lab.running import Book, Step, do_all
from dualpath.lab.spec import LabSpec

pytestmark = [
    pytest.mark.integration, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(300),
]  # fmt: skip

SPEC = LabSpec("no model", prefill=1, decode=1)
WAIT_S = 30.0


async def test_after_a_failed_run_the_next_gets_hosts_of_its_own(tmp_path: Path) -> None:
    try:
        check_machine()
    except ConfigError as error:
        pytest.skip(str(error))
    seen: list[set[int]] = []
    said: list[str] = []
    left: list[subprocess.Popen[bytes]] = []

    @asynccontextmanager
    async def cluster() -> AsyncIterator[LabNetwork]:
        with lab_network(SPEC, tmp_path / "run") as network:
            yield network

    async def fails(network: LabNetwork) -> None:
        argv = network.command("pe0", ["sh", "-c", "echo up; exec sleep 600"])
        left.append(subprocess.Popen(argv, stdout=subprocess.PIPE))  # noqa: ASYNC220
        assert left[0].stdout is not None
        assert await asyncio.to_thread(left[0].stdout.readline) == b"up\n"
        seen.append(set(inside.processes(namespace("pe0"))))
        assert left[0].pid in seen[0]
        raise RunFailed("agents did not finish")

    async def works(network: LabNetwork) -> None:
        assert set(network.nodes) == {"pe0", "de0"}
        seen.append(set(inside.processes(namespace("pe0"))))

    experiment = Experiment("made", "made by hand", ())
    book = Book(tmp_path, partial(gathered, experiment, SPEC, tmp_path), said.append)
    await do_all([Step("one", fails), Step("two", works)], "hosts", cluster, book)
    assert said == ["failed: one: agents did not finish"]
    assert len(seen) == 2 and not seen[0] & seen[1]
    assert left[0].wait(WAIT_S) == -signal.SIGKILL
    assert leftovers() == []
