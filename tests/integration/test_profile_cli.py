"""``dualpath profile`` as a command, against a front whose engines' times are made up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import BLOCK, FINGERPRINT
from front_kit import FakeCluster, free_port, make_config, running_cluster

from dualpath import config as cluster_config
from dualpath.cli.main import run
from dualpath.config import ClusterConfig
from dualpath.control.messages import Report
from dualpath.scheduler.profile import decode_profile
from dualpath.workload.synth import regular
from dualpath.workload.trace import write_trace

pytestmark = pytest.mark.integration

TOKEN_BYTES = FINGERPRINT.num_layers * FINGERPRINT.token_layer_bytes


def described(folder: Path, **sections: Any) -> ClusterConfig:
    return make_config(folder, model={"path": "made-up/model"}, **sections)


def attention_s(cached: int, bsz: int) -> float:
    return 2e-3 + 1e-5 * bsz + 2e-7 * cached * bsz


@contextlib.asynccontextmanager
async def attending(cluster: FakeCluster, noise: float) -> AsyncIterator[None]:
    """The PE reports what attention "took" for each of its prompts; for half of the grid ``noise``
    times as long."""

    async def work() -> None:
        done = 0
        while True:
            while done < len(cluster.pe.bodies):
                path, body = cluster.pe.bodies[done]
                done += 1
                if path != "/v1/completions":
                    continue
                cached = body["kv_transfer_params"]["dualpath"]["hit_tokens"]
                bsz = len(body["prompt"]) - cached
                disturbed = (cached // BLOCK + bsz // 16) % 2
                seconds = attention_s(cached, bsz) * (noise if disturbed else 1.0)
                cluster.pe.send(
                    Report(stats=cluster.pe._stats(), attention=[(cached, bsz, seconds)])
                )
            await asyncio.sleep(0.005)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()


async def profile(
    config: ClusterConfig, url: str, folder: Path, *more: str
) -> tuple[int, str, str]:
    """Run the command; status, stdout, stderr."""
    file = folder / "cluster.toml"
    file.write_text(cluster_config.dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dualpath.cli.main", "profile", "--config", str(file)),
        *("--url", url, "--out", str(folder / "profile.json"), *more),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_what_was_measured_is_written_and_printed(tmp_path: Path) -> None:
    trace = tmp_path / "work.jsonl"
    write_trace(trace, regular(2, 3, 100, 20))
    config = described(tmp_path)
    async with running_cluster(config) as cluster, attending(cluster, 1.0):
        code, out, err = await profile(
            config, cluster.url, tmp_path, "--json", "--trace", str(trace)
        )
        assert code == 0, err
        assert (await cluster.get("/debug/state"))["policy"] == "paper"
        await cluster.idle()
    (line,) = out.splitlines()
    figures: dict[str, Any] = json.loads(line)
    made = decode_profile((tmp_path / "profile.json").read_bytes())
    assert figures["profile"] == str(tmp_path / "profile.json")
    assert figures["config"] == {"scheduler": {"profile": figures["profile"]}}
    assert (figures["alpha_tokens"], figures["beta_tokens"]) == (
        made.alpha_tokens, made.beta_tokens,
    )  # fmt: skip
    assert made.token_bytes == TOKEN_BYTES
    # Prompts of 100, 220 and 340 tokens, of which 100 each are new.
    assert made.hit_ratio == pytest.approx(360 / 660)
    assert figures["hit_ratio_of"] == str(trace)
    # These engines read in no time, so that their reads were never seen waiting.
    assert sorted(figures["snic_lower_bounds"]) == ["d0", "p0"]
    assert min(made.snic_read_bytes_s.values()) > 0
    assert made.attention.mean_relative_error < 1e-6
    assert made.attention.batch_s([(10 * BLOCK, 100)]) == pytest.approx(
        attention_s(10 * BLOCK, 100)
    )
    assert "measuring: prefill" in err
    assert "SNIC reads, decode" in err


async def test_a_bad_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    config = described(tmp_path)
    async with running_cluster(config) as cluster, attending(cluster, 50.0):
        code, out, err = await profile(config, cluster.url, tmp_path)
        assert code == 1
        assert out == ""
        (reason,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "the attention-time model is off by" in reason
        assert "more than 15%" in reason
        assert not (tmp_path / "profile.json").exists()
        assert (await cluster.get("/debug/state"))["policy"] == "paper"
        await cluster.idle()


async def test_others_use_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = described(tmp_path, timeouts={"request": "60s"})
    async with running_cluster(config) as cluster:
        cluster.de.hold("decode")
        body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 4}
        other = asyncio.create_task(cluster.post("/v1/completions", body))
        await cluster.until(lambda: "de0 holds decode" in cluster.shared.events)
        code, _, err = await profile(config, cluster.url, tmp_path, "--timeout", "1")
        assert code == 1
        assert "error: not over after 1 s" in err
        cluster.de.release("decode")
        assert (await other)[0] == 200


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--url", "localhost:1"], "--url: must start with http:// or https://"),
        (["--out", "/no/such/folder/p.json"], "--out: there is no folder /no/such/folder"),
        (["--trace", "/no/such/trace"], "--trace: /no/such/trace: cannot be read"),
        (["--config", "/no/such/file"], "/no/such/file: cannot be read"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_config.dump(described(tmp_path)))
    assert run(["profile", "--config", str(file), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert text in err
    assert len(err.splitlines()) == 1


def test_no_front_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_config.dump(described(tmp_path)))
    url = f"http://127.0.0.1:{free_port()}"
    out = tmp_path / "profile.json"
    assert run(["profile", "--config", str(file), "--url", url, "--out", str(out)]) == 1
    assert f"error: {url}/debug/state: " in capsys.readouterr().err
    assert not out.exists()
