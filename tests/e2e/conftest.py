"""One real cluster and one plain vLLM for all e2e tests: engines take a minute to start."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from cluster_kit import (
    Api,
    Servers,
    cluster_description,
    free_port,
    open_session,
    start,
    start_cluster,
    until_ready,
)

from dualpath.engine import models
from dualpath.engine.launch import installed_device, plain_command


@pytest.fixture(scope="session")
def model() -> Path:
    return models.ensure(models.BundledModel.TINY)


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The cluster and a plain vLLM, started together because each takes a minute."""
    folder = tmp_path_factory.mktemp("cluster")
    config = cluster_description(str(model), folder / "store", free_port())
    port = free_port()
    command = plain_command(
        config, python=sys.executable, device=installed_device(), host="127.0.0.1", http_port=port
    )
    plain = start(
        [*command.argv, "--enable-prompt-tokens-details"],
        folder / "plain.log",
        f"http://127.0.0.1:{port}",
        dict(command.env),
    )
    cluster = start_cluster(config, folder)
    try:
        until_ready(plain, "/health")
        until_ready(cluster, "/ready")
        yield Servers(cluster, plain, folder / "store")
    finally:
        cluster.stop()
        plain.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session(100) as session:
        yield session


@pytest.fixture
async def front(servers: Servers, http: aiohttp.ClientSession) -> AsyncIterator[Api]:
    """The cluster's API; afterwards every ledger must be back to zero."""
    api = Api(servers.cluster.url, http)
    yield api
    await api.idle()


@pytest.fixture
def plain(servers: Servers, http: aiohttp.ClientSession) -> Api:
    return Api(servers.plain.url, http)
