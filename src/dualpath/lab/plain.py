"""One plain vLLM without connector: what its tokens are, is what is right."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from dualpath.config import ClusterConfig
from dualpath.engine import launch
from dualpath.serve.local import answers
from dualpath.serve.ports import free_ports
from dualpath.serve.supervise import ChildSpec, Listener, RestartPolicy, Supervisor

_HOST: Final = "127.0.0.1"


@asynccontextmanager
async def plain_vllm(
    config: ClusterConfig, log: Path, listener: Listener | None = None
) -> AsyncIterator[str]:
    """The model of ``config`` on one vLLM of this machine for the time of the block; its URL.

    Raises:
        StartFailed: it did not start.
        NoFreePort, NoEngine: it cannot.
    """
    (port,) = free_ports(_HOST, 1)
    command = launch.plain_command(
        config,
        python=sys.executable,
        device=launch.installed_device(),
        host=_HOST,
        http_port=port,
        inherited=os.environ,
    )
    url = f"http://{_HOST}:{port}"

    async def is_ready() -> bool:
        return await answers(f"{url}/health")

    child = ChildSpec("vllm", command.argv, log, is_ready, command.env)
    policy = RestartPolicy(drain_s=config.timeouts.drain)
    async with Supervisor([child], policy, listener) as supervisor:
        await supervisor.start()
        yield url
