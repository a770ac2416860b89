"""Joining, refusals, weight epochs, modes, and the parts of the API around the answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FINGERPRINT
from fake_model import tokens_of
from front_kit import BLOCK, PATIENCE_S, FakeCluster, make_config, running_cluster, running_front
from openai import AsyncOpenAI, NotFoundError

from dualpath.config import Role
from dualpath.storage import EpochFile

pytestmark = pytest.mark.integration

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
IDS = tokens_of("the same long prompt every time, several blocks")
BODY = {"model": "fake", "prompt": IDS, "max_tokens": 2}


async def cached(cluster: FakeCluster, **keys: Any) -> int:
    """Hit tokens of one more request."""
    status, answer, _ = await cluster.post(TEXT, {**BODY, **keys})
    assert status == 200
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# ---- handshake -----------------------------------------------------------------------------------


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"fingerprint": {"model": "other"}}, "model: 'other' != 'fake'"),
    ({"fingerprint": {"revision": "r2"}}, "revision:"),
    ({"fingerprint": {"dtype": "float16"}}, "dtype: 'float16' != 'float32'"),
    ({"fingerprint": {"num_layers": 3}}, "num_layers:"),
    ({"fingerprint": {"token_layer_bytes": 32}}, "token_layer_bytes:"),
    ({"fingerprint": {"block_tokens": 16}}, "block_tokens: 16 != 8"),
    ({"fingerprint": {"layout_id": "packed"}}, "layout_id: 'packed' != 'plain'"),
    ({"fingerprint": {"tp_size": 2}}, "tp_size: 2 != 1"),
    ({"protocol": 99}, "protocol: 99 != 2"),
    ({"secret": "wrong"}, "secret:"),
    ({"rank": 7}, "rank: 7 is outside 0..0"),
    ({"node": "elsewhere"}, "node: 'elsewhere' != 'd0'"),
    ({"name": "de9"}, "engine: 'de9' != 'de0'"),
]


async def test_a_misfit_is_refused_by_name(tmp_path: Path) -> None:
    async with running_front(make_config(tmp_path)) as cluster:
        await cluster.add(Role.PREFILL, 0)
        for change, named in MISFITS:
            engine = cluster.engine(Role.DECODE, 0)
            for key, value in change.items():
                if key == "fingerprint":
                    engine.fingerprint = msgspec.structs.replace(FINGERPRINT, **value)
                else:
                    setattr(engine, key, value)
            await engine.start()
            refused = engine.refused
            await engine.stop()
            assert refused is not None, named
            assert named in refused
        assert await cluster.status("/ready") == 503
        await cluster.add(Role.DECODE, 0)
        assert await cluster.status("/ready") == 200


async def test_a_name_belongs_to_one_process(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        double = cluster.engine(Role.DECODE, 0)
        await double.start()
        assert double.refused == "engine: another process is connected as 'de0'"
        await double.stop()
        assert await cluster.status("/ready") == 200


async def test_the_secret_lets_in(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    config = make_config(tmp_path, security={"control_secret_file": str(secret)})
    async with running_front(config) as cluster:
        engine = cluster.engine(Role.DECODE, 0)
        cluster.engines["de0"] = engine
        await engine.start()
        assert engine.refused is not None
        engine.refused, engine.secret = None, "s3cret"
        await engine.join()
        assert engine.refused is None


async def test_a_cluster_of_another_kind_can_follow(tmp_path: Path) -> None:
    """When every engine has left, the next one decides what the cluster is."""
    async with running_cluster(make_config(tmp_path)) as cluster:
        for name in ("pe0", "de0"):
            await cluster.engines.pop(name).kill()
        await cluster.gone("pe0", "de0")
        engine = cluster.engine(Role.DECODE, 0)
        engine.fingerprint = msgspec.structs.replace(FINGERPRINT, layout_id="packed")
        cluster.engines["de0"] = engine
        await engine.start()
        assert engine.refused is None


# ---- the index -----------------------------------------------------------------------------------


async def test_the_index_is_rebuilt_from_the_store(tmp_path: Path) -> None:
    """A front that starts finds what the directory holds, by file names alone."""
    config = make_config(tmp_path)
    async with running_cluster(config) as cluster:
        assert await cached(cluster) == 0
        assert await cached(cluster) == 5 * BLOCK
        stored = set(cluster.shared.stored)
    from dualpath.blocks import chain_keys

    root = next(iter(stored))[0]
    parent = root
    for key in chain_keys(root, IDS, BLOCK)[:3]:
        folder = Path(config.storage.path) / "blocks" / root.hex() / key[:1].hex()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{key.hex()}.{parent.hex()}").touch()
        parent = key
    async with running_cluster(make_config(tmp_path)) as cluster:
        cluster.shared.stored = stored
        assert (await cluster.get("/debug/state"))["index_blocks"] == 3
        assert await cached(cluster) == 3 * BLOCK


async def test_tenants_and_salts_do_not_share(tmp_path: Path) -> None:
    keys = {"key-a": "a", "key-b": "b", "key-a2": "a"}
    async with running_cluster(make_config(tmp_path, security={"api_keys": keys})) as cluster:

        async def hit(key: str, **more: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            status, answer, _ = await cluster.post(TEXT, {**BODY, **more}, headers)
            assert status == 200
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await hit("key-a") == 0
        assert await hit("key-b") == 0
        assert await hit("key-a2") == 5 * BLOCK
        assert await hit("key-a", cache_salt="s") == 0
        assert await hit("key-a", cache_salt="s") == 5 * BLOCK
        for headers in (None, {"authorization": "Bearer nope"}, {"authorization": "key-a"}):
            status, answer, _ = await cluster.post(TEXT, BODY, headers)
            assert (status, answer["error"]["code"]) == (401, 401)
            assert await cluster.status("/v1/models") == 401


# ---- weight epochs -------------------------------------------------------------------------------


async def test_new_weights_make_old_kv_unreachable(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with running_cluster(config) as cluster:
        assert await cached(cluster) == 0
        assert await cached(cluster) == 5 * BLOCK
        assert await cluster.de.change_weights() == 1
        assert EpochFile(config.storage.path).read().weight_epoch == 1
        assert await cached(cluster) == 0
        assert await cached(cluster) == 5 * BLOCK
        status, answer, _ = await cluster.post("/admin/weights/advance", {})
        assert (status, answer) == (200, {"weight_epoch": 2})
        assert await cached(cluster) == 0
        assert (await cluster.get("/debug/state"))["weight_epoch"] == 2
    async with running_cluster(make_config(tmp_path)) as cluster:
        state = await cluster.get("/debug/state")
        assert state["weight_epoch"] >= 2, "the epoch fell over a restart"


async def test_an_engine_with_other_weights_advances_the_epoch(tmp_path: Path) -> None:
    """One restarted from disk after an update in place has older weights than the KV."""
    config = make_config(tmp_path, decode=2)
    async with running_cluster(config) as cluster:
        assert await cluster.pe.change_weights() == 1
        second = cluster.engine(Role.DECODE, 1)
        second.in_place = True  # updated as well: nothing new
        cluster.engines["de1"] = second
        await second.start()
        assert second.welcome is not None
        assert second.welcome.weight_epoch == 1
        await second.kill()
        fresh = await cluster.add(Role.DECODE, 1)
        assert fresh.welcome is not None
        assert fresh.welcome.weight_epoch == 2


async def test_weights_changed_without_a_front(tmp_path: Path) -> None:
    async with running_front(make_config(tmp_path)) as cluster:
        engine = cluster.engine(Role.DECODE, 0)
        engine.weights_changed = engine.in_place = True
        cluster.engines["de0"] = engine
        await engine.start()
        assert engine.welcome is not None
        assert engine.welcome.weight_epoch == 1


async def test_an_epoch_that_cannot_be_written_stops_hits(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with running_cluster(config) as cluster:
        assert await cached(cluster) == 0
        assert await cached(cluster) == 5 * BLOCK
        path = Path(config.storage.path) / "epoch.json"
        path.mkdir(parents=True)  # neither readable nor replaceable as a file, also for root
        status, answer, _ = await cluster.post("/admin/weights/advance", {})
        assert (status, answer["error"]["code"]) == (503, 503)
        stored = len(cluster.shared.stored)
        assert await cached(cluster) == 0, "old KV was hit after its weights had gone"
        assert len(cluster.shared.stored) == stored, "new KV was written under the old epoch"
        path.rmdir()
        status, _, _ = await cluster.post("/admin/weights/advance", {})
        assert status == 200
        assert await cached(cluster) == 0
        assert await cached(cluster) == 5 * BLOCK


@pytest.mark.parametrize("point", ["queue", "open"])
async def test_weights_that_change_under_a_request(tmp_path: Path, point: str) -> None:
    """A hit found before the update is not used after it."""
    config = make_config(tmp_path)
    async with running_cluster(config) as cluster:
        assert await cached(cluster) == 0
        engine = cluster.pe
        if point == "queue":
            engine.silent = True
            await engine.kill()
            await cluster.gone("pe0")
        else:
            engine.hold("open")
        request = asyncio.create_task(cached(cluster))
        if point == "queue":
            async with asyncio.timeout(PATIENCE_S):
                while not (await cluster.get("/debug/state"))["scheduler"]["waiting_prefill"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        else:
            await cluster.until(lambda: "pe0 holds open" in cluster.shared.events)
        await cluster.post("/admin/weights/advance", {"in_place": False})
        if point == "queue":
            await cluster.add(Role.PREFILL, 0)
        else:
            engine.release("open")
        assert await request == 0
        await cluster.idle()


# ---- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["basic", "pe-only", "dualpath", "split", "oracle"])
async def test_modes(tmp_path: Path, mode: str) -> None:
    config = make_config(tmp_path, mode=mode, benchmark=mode == "oracle")
    async with running_cluster(config) as cluster:
        for expected in (0, 5 * BLOCK):
            cluster.de.hold("decode")
            request = asyncio.create_task(cluster.post(TEXT, BODY))
            await cluster.until(lambda: bool(cluster.de.bodies))
            (session,) = cluster.de.sessions.values()
            spec = session.spec
            assert spec.layerwise is (mode != "basic")
            assert spec.bypass is (mode == "oracle")
            assert spec.persist is (mode != "oracle")
            cluster.de.release("decode")
            _, answer, headers = await request
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
            cluster.de.bodies.clear()
        if mode in ("basic", "pe-only"):
            assert headers["x-dualpath-path"] == "pe"
        state = await cluster.get("/debug/state")
        assert state["mode"] == mode
        await cluster.idle()


async def test_the_mode_changes_between_requests(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        assert (await cluster.post("/admin/mode", {"mode": "oracle"}))[0] == 400
        assert (await cluster.post("/admin/mode", {"mode": "nonsense"}))[0] == 400
        assert (await cluster.post("/admin/mode", {"mode": "dualpath", "policy": "x"}))[0] == 400
        cluster.de.hold("decode")
        request = asyncio.create_task(cluster.post(TEXT, BODY))
        await cluster.until(lambda: bool(cluster.de.bodies))
        assert (await cluster.post("/admin/mode", {"mode": "basic"}))[0] == 409
        cluster.de.release("decode")
        await request
        await cluster.idle()
        assert (await cluster.post("/admin/mode", {"mode": "basic"}))[0] == 200
        assert await cached(cluster) == 5 * BLOCK
        assert (await cluster.get("/debug/state"))["mode"] == "basic"
        await cluster.idle()


# ---- the API around it ---------------------------------------------------------------------------


async def test_the_official_client(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        async with AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
        ) as client:
            assert [model.id async for model in client.models.list()] == ["fake"]
            answer = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3
            )
            pieces = []
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=3,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                pieces += [choice.delta.content or "" for choice in chunk.choices]
                if chunk.usage is not None:
                    usage = chunk.usage
            assert "".join(pieces) == answer.choices[0].message.content
            assert answer.usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens == answer.usage.prompt_tokens
            with pytest.raises(NotFoundError):
                await client.completions.create(model="other", prompt="hi")
        await cluster.idle()


BAD_CHATS: list[Any] = [
        b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"messages": NaN}',
        {}, {"messages": []}, {"messages": "hi"}, {"messages": [3]}, {"messages": [{"role": 1}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]},
        {"messages": [{"role": "user", "content": "x"}], "stream": "yes"},
        {"messages": [{"role": "user", "content": "x"}], "n": 0},
        {"messages": [{"role": "user", "content": "x"}], "n": 10**30},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1.5},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100_000},
        {"messages": [{"role": "user", "content": "x"}], "stream_options": {}},
        {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"a": 1}},
        {"messages": [{"role": "user", "content": "x"}], "cache_salt": 3},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": "x"},
        {"messages": [{"role": "user", "content": "x" * 600}]},
    ]  # fmt: skip
BAD_PROMPTS: list[Any] = [
    None, [], "", ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**32], [1.5], [True], 7, {"a": 1},
]  # fmt: skip


async def test_malformed_bodies_are_400(tmp_path: Path) -> None:
    bad = [(CHAT, body) for body in BAD_CHATS]
    bad += [(TEXT, {"model": "fake", "prompt": prompt}) for prompt in BAD_PROMPTS]
    async with running_cluster(make_config(tmp_path)) as cluster:
        for path, body in bad:
            status, answer, _ = await cluster.post(path, body)
            assert (status, answer["error"]["code"]) == (400, 400), body
            assert answer["error"]["message"]
        assert (await cluster.chat("still there"))[0] == 200
        await cluster.idle()


async def test_paths_methods_and_sizes(tmp_path: Path) -> None:
    async with running_front(make_config(tmp_path)) as cluster:
        assert await cluster.status("/health") == 200
        assert await cluster.status("/ready") == 503
        assert await cluster.status("/nowhere") == 404
        assert await cluster.status(CHAT) == 405
        assert await cluster.status("/v1/models/fake") == 200
        assert await cluster.status("/v1/models/other") == 404
        status, answer, _ = await cluster.post(CHAT, b"x" * ((64 << 20) + 1))
        assert (status, answer["error"]["code"]) == (413, 413)
        await cluster.add(Role.PREFILL, 0)
        assert await cluster.status("/ready") == 503
        await cluster.add(Role.DECODE, 0)
        assert await cluster.status("/ready") == 200


async def test_metrics_and_records(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        await cached(cluster)
        await cached(cluster)
        await cluster.idle()
        async with cluster.http.get(cluster.url + "/metrics") as response:
            text = await response.text()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert lines['dualpath_prompt_tokens_total{kind="hit"}'] == str(5.0 * BLOCK)
        assert lines['dualpath_prompt_tokens_total{kind="miss"}'] == str(
            float(2 * len(IDS) - 5 * BLOCK)
        )
        assert lines['dualpath_first_tokens_total{engine="pe"}'] == "2.0"
        assert lines['dualpath_engine_up{engine="de0",node="d0"}'] == "1.0"
        assert lines["dualpath_index_blocks"] == "6.0"
        assert lines["dualpath_time_to_first_token_seconds_count"] == "2.0"
        for phase in ("schedule", "allocate", "read", "prefill"):
            assert lines[f'dualpath_phase_seconds_count{{phase="{phase}"}}'] == "2.0"
        records = (await cluster.get("/debug/requests"))["requests"]
        assert [record["hit_tokens"] for record in records] == [0, 5 * BLOCK]
        assert all(record["outcome"] == "ok" for record in records)
        state = await cluster.get("/debug/state")
        assert sum(state["snic"].values()) == 5 * 100
        await cluster.pe.kill()
        await cluster.add(Role.PREFILL, 0)
        state = await cluster.get("/debug/state")
        assert sum(state["snic"].values()) == 5 * 100, "totals fell with a restart"


async def test_admin_needs_its_key(tmp_path: Path) -> None:
    config = make_config(tmp_path, security={"admin_key": "root"})
    async with running_front(config) as cluster:
        assert await cluster.status("/debug/state") == 401
        assert (await cluster.post("/admin/mode", {"mode": "basic"}))[0] == 401
        headers = {"authorization": "Bearer root"}
        assert (await cluster.post("/admin/mode", {"mode": "basic"}, headers))[0] == 200
