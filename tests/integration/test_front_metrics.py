"""Metrics: each documented one exists and counts right; alerts and dashboard use no others."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_engine import BLOCK
from fake_model import tokens_of
from front_kit import PATIENCE_S, FakeCluster, make_config, running_cluster, running_front
from prometheus_client.parser import text_string_to_metric_families

from dualpath import measuring
from dualpath.config import Role

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
IDS = tokens_of("a" * 5 * BLOCK)
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


async def families(cluster: FakeCluster) -> dict[str, Any]:
    """Metric families by the name that queries use."""
    async with cluster.http.get(cluster.url + "/metrics") as response:
        assert response.status == 200
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue  # the client library's own
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = family
    return found


async def value(cluster: FakeCluster, name: str, /, **labels: str) -> float:
    """One sample."""
    for family in (await families(cluster)).values():
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"no {name}{labels}")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Name to type and labels, from the table in docs/operations.md."""
    table = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2]
    rows = re.findall(r"^\| `(dualpath_\w+)` \| (\w+) \| (.*?) \|", table, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


async def exercise(cluster: FakeCluster) -> None:
    """Everything that makes a sample appear."""
    body = {"prompt": IDS, "max_tokens": 3}
    cluster.pe.http_status["/v1/completions"] = 500  # a retry
    await cluster.post(TEXT, body)
    del cluster.pe.http_status["/v1/completions"]
    await cluster.post(TEXT, body)
    await cluster.stream(TEXT, body)
    await cluster.idle()


async def test_the_documented_metrics_are_those_that_exist(tmp_path: Path) -> None:
    config = make_config(tmp_path, front={"max_retries": 1})
    async with running_cluster(config) as cluster:
        for engine in cluster.engines.values():
            engine.counters = {
                "storage_read_blocks_ok": 1, "storage_write_blocks_full": 1, "d2_bytes": 1,
                "host_to_device_bytes": 1, "something_new": 1,
            }  # fmt: skip
        await exercise(cluster)
        found = await families(cluster)
    table = documented()
    assert set(found) == set(table)
    for name, family in found.items():
        kind, labels = table[name]
        assert family.type == kind, name
        assert family.documentation, name
        own = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert own <= labels, (name, own)
        if family.samples:
            assert own == labels, (name, own)
        unit = name.removesuffix("_total")
        assert not unit.endswith(("_ms", "_kb", "_mb", "_percent")), name


async def test_tokens_bytes_and_blocks_are_counted_once(tmp_path: Path) -> None:
    block_bytes = 2 * BLOCK * 16
    async with running_cluster(make_config(tmp_path, mode="split")) as cluster:
        body = {"prompt": IDS, "max_tokens": 3}
        for _ in range(3):
            await cluster.post(TEXT, body)
        await cluster.idle()
        hits = 2 * 4 * BLOCK  # the last block of a full hit is computed
        assert await value(cluster, "dualpath_prompt_tokens_total", kind="hit") == hits
        misses = 3 * len(IDS) - hits
        assert await value(cluster, "dualpath_prompt_tokens_total", kind="miss") == misses
        assert await value(cluster, "dualpath_generation_tokens_total") == 9
        blocks = [
            await value(cluster, "dualpath_path_blocks_total", path=side) for side in ("pe", "de")
        ]
        read = [
            await value(cluster, "dualpath_path_bytes_total", path=side) for side in ("pe", "de")
        ]
        assert sum(blocks) == hits // BLOCK
        assert read == [count * block_bytes for count in blocks]
        reads = [
            await value(cluster, "dualpath_read_seconds_count", path=side) for side in ("pe", "de")
        ]
        assert sum(reads) == sum(count > 0 for count in blocks) * 2
        for side in ("pe", "de"):
            assert await value(cluster, "dualpath_buffer_wait_seconds_count", side=side) == 3
        for phase in ("schedule", "allocate", "read", "prefill", "handover"):
            assert await value(cluster, "dualpath_phase_seconds_count", phase=phase) == 3


@pytest.mark.parametrize("sampler", ["pe", "de"])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_times_of_tokens(tmp_path: Path, path: str, sampler: str) -> None:
    """Streams have all three; of a whole answer only token 1 from the PE is seen."""
    message = {"role": "user", "content": "how deep?"}
    body: dict[str, Any] = {"messages": [message]} if path == CHAT else {"prompt": IDS}
    body |= {"max_tokens": 5} | ({"seed": 1} if sampler == "de" else {})
    first = "dualpath_time_to_first_token_seconds"
    second = "dualpath_time_to_second_token_seconds"
    each = "dualpath_time_per_output_token_seconds"
    async with running_cluster(make_config(tmp_path)) as cluster:
        await cluster.post(path, body)
        await cluster.idle()
        whole = 1 if sampler == "pe" else 0
        assert await value(cluster, f"{first}_count") == whole
        assert await value(cluster, f"{second}_count") == 0
        _, events, _ = await cluster.stream(path, body)
        assert all("usage" not in event for event in events[:-1]), "usage nobody asked for"
        await cluster.idle()
        assert await value(cluster, f"{first}_count") == whole + 1
        assert await value(cluster, f"{second}_count") == 1
        assert await value(cluster, f"{each}_count") == 1
        assert await value(cluster, "dualpath_generation_tokens_total") == 10
        assert await value(cluster, "dualpath_first_tokens_total", engine=sampler) == 2
        record = (await cluster.get("/debug/requests"))["requests"][-1]
        assert record["output_tokens"] == 5
        gaps = await value(cluster, f"{each}_sum") * 4
        assert 0 < record["ttst_s"] <= gaps + 1e-9
        assert 0 < record["ttft_s"] < record["total_s"]
        one = {**body, "max_tokens": 1}
        await cluster.stream(path, one)
        await cluster.idle()
        assert await value(cluster, f"{each}_count") == 1, "one token has no pace"


async def test_what_goes_wrong_is_counted(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        body = {"prompt": IDS, "max_tokens": 3}
        cluster.pe.fail_prefill = "told to"
        assert (await cluster.post(TEXT, body))[0] == 200
        assert await value(cluster, "dualpath_retries_total", reason="session_failed") == 1
        cluster.shared.stored.clear()
        assert (await cluster.post(TEXT, body))[0] == 200
        assert await value(cluster, "dualpath_bad_blocks_total") == 4
        assert await value(cluster, "dualpath_dropped_blocks_total", reason="missing") == 1
        await cluster.post(TEXT, {**body, "model": "other"})
        cluster.pe.http_status["/v1/completions"] = 500
        assert (await cluster.post(TEXT, body))[0] == 503
        failed = {"outcome": "failed", "path": "pe", "mode": "dualpath"}
        found = (await families(cluster))["dualpath_requests_total"].samples
        outcomes: dict[str, float] = {}
        for sample in found:
            outcome = sample.labels["outcome"]
            assert sample.labels.keys() == failed.keys()
            outcomes[outcome] = outcomes.get(outcome, 0) + sample.value
        assert outcomes == {"ok": 2.0, "failed": 1.0}


async def test_engine_figures(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path, prefill=2)) as cluster:
        assert await value(cluster, "dualpath_engines_expected", role="prefill") == 2
        assert await value(cluster, "dualpath_engines_usable", role="prefill") == 1
        assert await value(cluster, "dualpath_engines_usable", role="decode") == 1
        engine = cluster.de
        engine.counters = {
            "storage_read_bytes": 70.0, "storage_write_bytes": 30.0,
            "storage_read_blocks_ok": 5.0, "storage_read_blocks_corrupt": 2.0,
            "storage_write_blocks_full": 3.0, "storage_evicted_blocks": 4.0, "loads_failed": 1.0,
            "d2_bytes": 11.0, "push_hit_bytes": 12.0, "push_miss_bytes": 13.0,
            "agent_failures": 6.0, "attention_seconds": 1.5, "something_new": 9.0,
        }  # fmt: skip
        engine.read_queue_tokens = 640

        def seen(state: dict[str, Any]) -> bool:
            stats = {each["name"]: each["stats"] for each in state["engines"]}["de0"]
            return stats["counters"].get("something_new") == 9.0

        async with asyncio.timeout(PATIENCE_S):
            while not seen(await cluster.get("/debug/state")):
                pass
        of = {"engine": "de0", "node": "d0"}
        for name, labels, expected in (
            ("snic_read_bytes_total", {}, 70),
            ("snic_write_bytes_total", {}, 30),
            ("storage_read_blocks_total", {"status": "ok"}, 5),
            ("storage_read_blocks_total", {"status": "corrupt"}, 2),
            ("storage_write_blocks_total", {"status": "full"}, 3),
            ("checksum_failures_total", {}, 2),
            ("evicted_blocks_total", {}, 4),
            ("recomputed_loads_total", {}, 1),
            ("compute_network_bytes_total", {"kind": "d2"}, 11),
            ("compute_network_bytes_total", {"kind": "push_miss"}, 13),
            ("transfer_failures_total", {}, 6),
            ("attention_seconds_total", {}, 1.5),
            ("engine_events_total", {"name": "something_new"}, 9),
            ("read_queue_tokens", {}, 640),
            ("hbm_capacity_tokens", {}, 10_000),
            ("buffer_capacity_slots", {}, 64),
            ("engine_up", {}, 1),
            ("engine_failing", {}, 0),
        ):
            assert await value(cluster, f"dualpath_{name}", **of, **labels) == expected, name


async def test_node_figures(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with running_front(config) as cluster:
        await cluster.add(Role.PREFILL, 0)
        for node in ("p0", "d0"):
            assert await value(cluster, "dualpath_snic_read_bytes_per_second", node=node) == 0
        assert await value(cluster, "dualpath_snic_read_difference_ratio") == 0
        assert await value(cluster, "dualpath_attention_max_over_mean_ratio") == 1
        assert await value(cluster, "dualpath_ready") == 0


# ---- what is built on them ----


def used(expression: str) -> set[str]:
    return set(re.findall(r"\bdualpath_\w+", expression))


def exported() -> set[str]:
    """Sample names."""
    names = set()
    for name, (kind, _) in documented().items():
        base = name.removesuffix("_total")
        names |= {base + suffix for suffix in SUFFIXES[kind]}
    return names


def test_alerts_use_metrics_that_exist() -> None:
    text = (ROOT / "deploy" / "prometheus-alerts.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    assert len(alerts) == len(set(alerts)) > 10
    names = used(text)
    assert names and names <= exported(), names - exported()
    described = (ROOT / "docs" / "operations.md").read_text()
    for alert in alerts:
        assert f"`{alert}`" in described, alert


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    rules = ROOT / "deploy" / "prometheus-alerts.yml"
    subprocess.run([promtool, "check", "rules", str(rules)], check=True, timeout=60)
    cases = ROOT / "tests" / "unit" / "prometheus_rules.yml"
    subprocess.run(
        [promtool, "test", "rules", cases.name], check=True, timeout=60, cwd=cases.parent
    )


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    variables = {item["name"] for item in dashboard["templating"]["list"]}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            names = used(target["expr"])
            assert names and names <= exported(), names - exported()
            dollars = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert dollars <= variables
            balanced(target["expr"])
            counters = {name for name in names if name.endswith(("_total", "_bucket"))}
            for name in counters:
                assert re.search(rf"(rate|increase)\({name}\b", target["expr"]), "a raw counter"


def balanced(expression: str) -> None:
    closing = {")": "(", "]": "[", "}": "{"}
    stack: list[str] = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in closing.values():
            stack.append(character)
        elif character in closing:
            assert stack and stack.pop() == closing[character], expression
    assert stack == [], expression


async def test_a_measurements_prompts_are_not_the_work_the_front_has_served(
    tmp_path: Path,
) -> None:
    """Else a second ``dualpath profile`` would take the first one's hits for the workload's."""
    body = {"model": "fake", "prompt": IDS, "max_tokens": 4}
    async with running_cluster(make_config(tmp_path)) as cluster:
        for _ in range(2):
            assert (await cluster.post(TEXT, body))[0] == 200
        work = (await cluster.get("/debug/state"))["tokens"]
        assert work == {"hit": len(IDS) - BLOCK, "miss": len(IDS) + BLOCK}
        for _ in range(3):
            marked = {**body, "cache_salt": f"{measuring.SALT}1"}
            assert (await cluster.post(TEXT, marked))[0] == 200
        assert (await cluster.get("/debug/state"))["tokens"] == work
        (counted,) = [
            sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
            for name, family in (await families(cluster)).items()
            if name == "dualpath_prompt_tokens_total"
        ]
        assert counted == 5 * len(IDS)
        await cluster.idle()
