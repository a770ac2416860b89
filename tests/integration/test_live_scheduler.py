"""The scheduler inside the front: decision log, profile, engines that join, attention samples."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FINGERPRINT
from fake_model import generate, text_of, tokens_of
from front_kit import PATIENCE_S, FakeCluster, make_config, running_cluster, running_front

from dualpath.config import ClusterConfig, ConfigError, Role
from dualpath.control.messages import Report
from dualpath.scheduler import Assignment, SchedulerSettings
from dualpath.scheduler.attention_time import AttentionTimeModel
from dualpath.scheduler.decision_log import (
    Added,
    Drained,
    Fetched,
    Started,
    Undrained,
    decode,
    encode,
    replay,
)
from dualpath.scheduler.profile import Profile, encode_profile
from dualpath.serve import decision_file
from dualpath.serve.decision_file import DecisionFile
from dualpath.serve.local import resolve
from dualpath.workload.profile_options import ProfileOptions
from dualpath.workload.profile_target import ProfileFailed
from dualpath.workload.profiling import measure

pytestmark = pytest.mark.integration

TEXT = "/v1/completions"
TOKEN_BYTES = FINGERPRINT.num_layers * FINGERPRINT.token_layer_bytes


def logged_config(folder: Path, **sections: Any) -> ClusterConfig:
    scheduler = {"decision_log": str(folder / "log.jsonl")} | sections.pop("scheduler", {})
    return make_config(folder, prefill=2, decode=2, scheduler=scheduler, **sections)


def lines_of(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


async def serve_some(cluster: FakeCluster, count: int) -> None:
    """``count`` requests, half of them at once, some of which continue others."""

    async def one(number: int) -> None:
        ids = tokens_of(f"shared beginning of a prompt, number {number % 3} " * (1 + number % 4))
        body = {"model": "fake", "prompt": ids, "max_tokens": 3}
        status, answer, _ = await cluster.post(TEXT, body)
        assert (status, answer["choices"][0]["text"]) == (200, text_of(generate(ids, 3)))

    half = count // 2
    await asyncio.gather(*(one(number) for number in range(half)))
    for number in range(half, count):
        await one(number)


def profile(folder: Path, **rates: float) -> Path:
    made = Profile(
        model="fake", hardware="none", token_bytes=TOKEN_BYTES, snic_read_bytes_s=rates,
        miss_tokens_per_s=100.0, hit_ratio=0.5,
        attention=AttentionTimeModel(1e-3, 1e-6, 0.0, 0.0, 0.0),
    )  # fmt: skip
    path = folder / "profile.json"
    path.write_bytes(encode_profile(made))
    return path


# ---- decision log ----------------------------------------------------------------------------


async def test_the_log_of_a_live_front_replays(tmp_path: Path) -> None:
    """Engines come and go, a request is given up, the mode changes: the same decisions again."""
    async with running_cluster(logged_config(tmp_path)) as cluster:
        await cluster.add(Role.PREFILL, 1)
        await cluster.add(Role.DECODE, 1)
        await serve_some(cluster, 12)
        cluster.pe.hold("open")
        cluster.engines["pe1"].hold("open")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await serve_some(cluster, 4)
        cluster.pe.release("open")
        cluster.engines["pe1"].release("open")
        await cluster.idle()
        await cluster.engines["de1"].kill()
        await cluster.gone("de1")
        status, _, _ = await cluster.post(
            "/admin/mode", {"mode": "dualpath", "policy": "round_robin"}
        )
        assert status == 200
        await serve_some(cluster, 6)
        await cluster.idle()
        served = len((await cluster.get("/debug/requests"))["requests"])
    lines = lines_of(tmp_path)
    decisions = replay(lines)
    assigned = [made.rid for decision in decisions for made in decision.assigned]
    assert len(assigned) == len(set(assigned)) == served == 12 + 2 + 6
    started = [record for record in map(decode, lines) if isinstance(record, Started)]
    assert [start.settings.policy for start in started] == ["paper", "round_robin"]
    # Both sides of it were decided live: the log is not of one engine.
    chosen = {made.prefill for decision in decisions for made in decision.assigned}
    assert chosen == {"pe0", "pe1"}


async def test_a_new_front_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """What a crash left of a last line is removed; everything before and after replays."""
    config = logged_config(tmp_path)
    async with running_cluster(config) as cluster:
        await serve_some(cluster, 4)
    before = lines_of(tmp_path)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(before[1][:-5])
    async with running_cluster(config) as cluster:
        await serve_some(cluster, 2)
        with pytest.raises(ConfigError, match=r"scheduler\.decision_log: another front writes"):
            DecisionFile(config.scheduler.decision_log)
    lines = lines_of(tmp_path)
    assert lines[: len(before)] == before
    assert sum(len(made.assigned) for made in replay(lines)) == 6


async def test_a_full_disk_does_not_stop_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = False

    def write(file: int, data: Any, offset: int) -> int:
        if not full:
            return os.pwrite(file, data, offset)
        if len(data) > 40:
            return os.pwrite(file, data[:40], offset)  # what still fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullDisk:
        def __getattr__(self, name: str) -> Any:
            return write if name == "pwrite" else getattr(os, name)

    monkeypatch.setattr(decision_file, "os", FullDisk())
    async with running_cluster(logged_config(tmp_path)) as cluster:
        await serve_some(cluster, 2)
        full = True
        await serve_some(cluster, 8)
        full = False
        await serve_some(cluster, 2)  # there is a gap: it could not be replayed
        said = [record for record in caplog.records if "no more decisions" in record.message]
        assert len(said) == 1
        metrics = await _text(cluster, "/metrics")
        (lost,) = (
            float(line.split()[1])
            for line in metrics.splitlines()
            if line.startswith("dualpath_decision_log_lines_lost_total ")
        )
        assert lost > 8
        assert sum(len(made.assigned) for made in replay(lines_of(tmp_path))) == 2
        await cluster.idle()
        await cluster.post("/admin/mode", {"mode": "dualpath"})
        await serve_some(cluster, 2)
    assert sum(len(made.assigned) for made in replay(lines_of(tmp_path))) == 4


async def test_a_disk_that_hangs_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines beyond the limit are lost, and so is all that follows them up to the next start."""
    monkeypatch.setattr(decision_file, "MOST_QUEUED", 3)
    started = encode(Started(SchedulerSettings(1, 1)))
    gone = encode(Drained("pe0"))
    log = DecisionFile(str(tmp_path / "log.jsonl"))
    for line in (started, gone, gone, gone):
        log.write(line)  # nothing is written meanwhile: the task does not run
    assert log.lost == 1
    log._append()
    log.write(gone)
    assert log.lost == 2
    log.write(started)
    log.write(gone)
    await log.close()
    assert log.lost == 2
    assert lines_of(tmp_path) == [started, gone, gone, started, gone]


async def _text(cluster: FakeCluster, path: str) -> str:
    async with cluster.http.get(cluster.url + path) as response:
        return await response.text()


# ---- profile ---------------------------------------------------------------------------------


async def test_measured_figures_replace_the_written_ones(tmp_path: Path) -> None:
    measured = profile(tmp_path, p0=TOKEN_BYTES * 500.0, d0=TOKEN_BYTES * 900.0)
    config = logged_config(
        tmp_path,
        scheduler={"profile": str(measured), "alpha_tokens": 7, "beta_tokens": 8},
        nodes=[
            {"name": "p0", "role": "prefill", "snic": {"read": "1kB/s"}},
            {"name": "p1", "role": "prefill", "snic": {"read": "64kB/s"}},
            {"name": "d0", "role": "decode"},
            {"name": "d1", "role": "decode"},
        ],
    )
    async with running_cluster(config) as cluster:
        await cluster.add(Role.PREFILL, 1)
        await cluster.add(Role.DECODE, 1)
        await serve_some(cluster, 2)
    records = [decode(line) for line in lines_of(tmp_path)]
    (start,) = (record for record in records if isinstance(record, Started))
    # alpha: 3 s of the slower SNIC; beta: 5 s of 100 tokens/s, half of all tokens being misses.
    assert start.settings == SchedulerSettings(1500, 1000, policy="paper")
    rates = {
        record.spec.node: record.spec.read_tokens_per_s
        for record in records
        if isinstance(record, Added)
    }
    # Measured, else written, else unknown.
    assert rates == {"p0": 500.0, "d0": 900.0, "p1": 64_000 / TOKEN_BYTES, "d1": 0.0}


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "cannot be read: No such file"), (b"{}", "not a profile: .*model")],
)
async def test_a_profile_that_cannot_be_used_is_said_at_the_start(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    config = make_config(tmp_path, scheduler={"profile": str(path)})
    with pytest.raises(ConfigError, match=rf"^scheduler\.profile: {path}:? {text}") as caught:
        async with running_front(config):
            pass
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=text):
        resolve(config)  # before 'up' starts anything


def test_paths_are_made_absolute_for_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile(tmp_path, p0=1.0)
    config = make_config(
        tmp_path, scheduler={"profile": "profile.json", "decision_log": "log.jsonl"}
    )
    settled = resolve(config).scheduler
    assert settled.profile == str(tmp_path / "profile.json")
    assert settled.decision_log == str(tmp_path / "log.jsonl")


# ---- engines ---------------------------------------------------------------------------------


async def small(cluster: FakeCluster, new: int) -> None:
    ids = tokens_of("a prompt of 20 bytes")
    body = {"model": "fake", "prompt": ids, "max_tokens": new}
    status, answer, _ = await cluster.post(TEXT, body)
    assert (status, answer["choices"][0]["text"]) == (200, text_of(generate(ids, new)))


async def test_a_joining_pe_gets_work_within_one_tick(tmp_path: Path) -> None:
    async with running_front(logged_config(tmp_path)) as cluster:
        await cluster.add(Role.DECODE, 0)
        work = [asyncio.create_task(small(cluster, 3)) for _ in range(4)]
        await waiting(cluster, "waiting_prefill", 4)
        await cluster.add(Role.PREFILL, 1)
        await asyncio.gather(*work)
    assert [made.prefill for made in first_fetch(tmp_path, "pe1", Role.PREFILL)] == ["pe1"] * 4


async def test_a_joining_de_gets_work_within_one_tick(tmp_path: Path) -> None:
    """Four requests wait because the only DE's HBM is promised to another one."""
    async with running_front(logged_config(tmp_path)) as cluster:
        await cluster.add(Role.PREFILL, 0)
        full = cluster.engines["de0"] = cluster.engine(Role.DECODE, 0)
        full.hbm_tokens = 64
        await full.start()
        await cluster.usable("de0", True)
        full.hold("decode")
        first = asyncio.create_task(small(cluster, 40))  # 20 + 40 tokens: all 64
        await cluster.until(lambda: "de0 holds decode" in cluster.shared.events)
        work = [asyncio.create_task(small(cluster, 3)) for _ in range(4)]
        await waiting(cluster, "waiting_decode", 4)
        await cluster.add(Role.DECODE, 1)
        await asyncio.gather(*work)
        full.release("decode")
        await first
        await cluster.idle()
    assert [made.decode for made in first_fetch(tmp_path, "de1", Role.DECODE)] == ["de1"] * 4


async def waiting(cluster: FakeCluster, queue: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await cluster.get("/debug/state"))["scheduler"][queue] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def first_fetch(folder: Path, engine: str, role: Role) -> list[Assignment]:
    """What the first fetch of ``role`` after ``engine`` has become usable has assigned."""
    records = [decode(line) for line in lines_of(folder)]
    usable = next(
        index
        for index, record in enumerate(records)
        if isinstance(record, Undrained) and record.engine == engine
    )
    fetches = [record for record in records[usable:] if isinstance(record, Fetched)]
    return list(next(f for f in fetches if f.group == role.value).decisions.assigned)


async def test_attention_samples_are_kept_for_the_profile(tmp_path: Path) -> None:
    async with running_cluster(make_config(tmp_path)) as cluster:
        empty = {"engines": {"pe0": {"total": 0, "samples": []}}}
        assert await cluster.get("/debug/attention") == empty
        stats = cluster.pe._stats()
        for number in range(1500):
            samples = [(number, 1, 0.5), (number, 2, 0.25)]
            cluster.pe.send(Report(stats=stats, attention=samples))
        async with asyncio.timeout(PATIENCE_S):
            seen = {"total": 0}
            while seen["total"] < 3000:
                await asyncio.sleep(0.01)
                seen = (await cluster.get("/debug/attention"))["engines"]["pe0"]
        assert seen["total"] == 3000
        assert len(seen["samples"]) == 2000
        assert seen["samples"][-1] == [1499, 2, 0.25]


async def test_measuring_gives_the_mode_back_and_says_why_it_failed(tmp_path: Path) -> None:
    """These engines compute nothing, so there are no attention times to fit."""
    async with running_cluster(make_config(tmp_path, mode="pe-only")) as cluster:
        options = ProfileOptions(
            url=cluster.url, model="fake", max_model_len=512, max_batched_tokens=64, vocab=500,
            hardware="none", timeout_s=60.0,
        )  # fmt: skip
        steps: list[str] = []

        def report(what: str, done: int, total: int) -> None:
            assert 0 <= done <= total
            if what not in steps:
                steps.append(what)

        with pytest.raises(ProfileFailed, match="report no attention times"):
            await measure(options, report)
        assert steps[:3] == ["prefill", "SNIC reads, prefill", "SNIC reads, decode"]
        state = await cluster.get("/debug/state")
        assert (state["mode"], state["policy"]) == ("pe-only", "pe_only")
        await cluster.idle()
