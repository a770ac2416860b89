"""A cluster whose store is a bucket of a real S3 server: right tokens, hits, and no server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_kit import (
    Api,
    Running,
    cluster_description,
    free_port,
    open_session,
    start,
    start_cluster,
    until_ready,
)
from s3_server import BUCKET, CREDENTIALS, S3Server, running_server
from test_tokens import BLOCK, hit_tokens, policy, random_prompt

from dualpath.engine.launch import installed_device, plain_command

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

FULL_BLOCK = 4 * BLOCK * 2 * 2 * 64 * 4  # layers, tokens, K and V, KV heads, head size, float32


@dataclass
class Bucketed:
    """Both servers of engines, and the one of blocks."""

    cluster: Running
    plain: Running
    s3: S3Server


@pytest.fixture(scope="module")
def bucketed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucketed]:
    folder = tmp_path_factory.mktemp("bucketed")
    with pytest.MonkeyPatch.context() as patch, running_server(folder) as s3:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        storage = {
            "path": f"s3://{BUCKET}/cluster",
            "capacity": "64MiB",
            "s3": {"endpoint": s3.endpoint, "allow_http": True, "timeout": "3s", "retries": 1},
        }
        config = cluster_description(str(model), folder / "unused", free_port(), storage=storage)
        port = free_port()
        command = plain_command(
            config, python=sys.executable, device=installed_device(), host="127.0.0.1",
            http_port=port,
        )  # fmt: skip
        plain = start(
            [*command.argv], folder / "plain.log", f"http://127.0.0.1:{port}", dict(command.env)
        )
        cluster = start_cluster(config, folder)
        try:
            until_ready(plain, "/health")
            until_ready(cluster, "/ready")
            yield Bucketed(cluster, plain, s3)
        finally:
            cluster.stop()
            plain.stop()


@pytest.fixture
async def apis(bucketed: Bucketed) -> AsyncIterator[tuple[Api, Api]]:
    async with open_session(100) as session:
        front = Api(bucketed.cluster.url, session)
        yield front, Api(bucketed.plain.url, session)
        await front.idle(30)


@pytest.mark.parametrize("way", ["pe_only", "de_only", "split"])
async def test_turns_hit_what_the_bucket_holds(
    bucketed: Bucketed, apis: tuple[Api, Api], way: str
) -> None:
    front, plain = apis
    await policy(front, way)
    paths = (await front.state())["path"]
    prompt, before = random_prompt(300), []
    hits = 0
    for turn in range(3):
        answer = await front.complete(prompt, 40)
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == await plain.tokens(prompt, 40), f"turn {turn}"
        expected = hit_tokens(prompt, before)
        details = answer["usage"]["prompt_tokens_details"] or {}
        assert details.get("cached_tokens", 0) == expected
        hits += expected
        before = (prompt + tokens)[:-1]
        prompt = prompt + tokens + random_prompt(50)
    moved = {side: count - paths[side] for side, count in (await front.state())["path"].items()}
    assert hits > 8 * BLOCK
    assert moved["pe"] + moved["de"] == hits // BLOCK * FULL_BLOCK
    stored = bucketed.s3.sizes("cluster/blocks")
    assert len(stored) >= hits // BLOCK // 2
    assert set(stored.values()) == {FULL_BLOCK + 4096}


async def test_serving_goes_on_when_the_bucket_is_gone(
    bucketed: Bucketed, apis: tuple[Api, Api]
) -> None:
    """The last one: it kills the server. What was stored is lost, no token is wrong."""
    front, plain = apis
    await policy(front, "paper")
    prompt = random_prompt(300)
    tokens = await front.tokens(prompt, 20)
    bucketed.s3.stop()
    prompt = prompt + tokens + random_prompt(40)
    for _ in range(2):
        answer = await front.complete(prompt, 20)
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == await plain.tokens(prompt, 20)
        details = answer["usage"]["prompt_tokens_details"] or {}
        assert details.get("cached_tokens", 0) == 0
        prompt = prompt + tokens + random_prompt(40)
