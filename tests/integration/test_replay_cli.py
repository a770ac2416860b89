"""``dualpath trace`` and ``dualpath replay`` as commands: output, exit codes, one-line errors."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from openai_server import OpenAIServer, running
from typer.testing import CliRunner

from dualpath.cli.replay import replay_command
from dualpath.cli.trace import trace_app
from dualpath.workload.records import read_records
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Round, read_trace

pytestmark = pytest.mark.integration

APP = typer.Typer()
APP.add_typer(trace_app, name="trace")
APP.command("replay")(replay_command)

PROGRAM = """
import typer
from dualpath.cli.replay import replay_command
app = typer.Typer()
app.command()(replay_command)
app()
"""


def invoke(*args: object) -> Any:
    return CliRunner().invoke(APP, [str(arg) for arg in args])


def test_synth_writes_a_row_and_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "w.jsonl.gz"
    result = invoke("trace", "synth", out, "--row", "32k", "--agents", 5, "--seed", 9, "--json")
    assert result.exit_code == 0
    assert list(read_trace(out)) == list(synthesise(ROWS["32k"], 5, 9))
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["trajectories"] == 5
    assert {"turns", "total", "macro", "request", "hit_ratio"} <= line.keys()
    stats = invoke("trace", "stats", out, "--json")
    assert json.loads(stats.stdout.splitlines()[-1]) == line


def test_synth_of_equal_agents(tmp_path: Path) -> None:
    out = tmp_path / "w.jsonl"
    result = invoke(
        "trace", "synth", out, "--agents", 3, "--turns", 2, "--append", 10, "--gen", 4,
        "--first-append", 90,
    )  # fmt: skip
    assert result.exit_code == 0
    assert [item.rounds for item in read_trace(out)] == [
        (Round(90, 4, 0.0), Round(10, 4, None))
    ] * 3
    assert "per request" in result.stdout


def test_wrong_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id":"a","rounds":[[1,1,-3]]}\n')
    good = tmp_path / "good.jsonl"
    good.write_text('{"id":"a","rounds":[[5,2,null]]}\n')
    url = ("--url", "http://127.0.0.1:9")
    for args, named in (
        (("trace", "stats", bad), "bad.jsonl:1: rounds[0][2]"),
        (("trace", "stats", tmp_path / "absent"), "cannot be read"),
        (("trace", "synth", tmp_path / "x", "--row", "16k"), "--row: '16k'"),
        (("trace", "synth", tmp_path / "x", "--row", "32k", "--gen", 3), "--gen"),
        (("trace", "synth", tmp_path / "no" / "x"), "cannot be written"),
        (("trace", "synth", tmp_path / "x", "--append", 0), "--append: must be at least 1"),
        (("replay", bad, *url), "bad.jsonl:1: rounds[0][2]"),
        (("replay", good, "--url", "127.0.0.1:9"), "--url: must start with"),
        (("replay", good, *url, "--aps", 0), "--aps: must be above 0"),
        (("replay", good, *url, "--answers", "none"), "--answers"),
        (("replay", good, *url, "--vocab", 50), "--vocab: must be above 100"),
        (("replay", good, *url, "--vocab", 500, "--model-config", bad), "--model-config"),
        (("replay", good, *url, "--model-config", tmp_path / "c.json"), "c.json"),
        (("replay", good, *url, "--text", tmp_path / "t.txt"), "--text: "),
        (("replay", good, *url, "--text", sys.executable), "is not UTF-8 text"),
        (("replay", good, "--url", "http://"), "--url: must be such as http://host:8000"),
        (("replay", good, "--url", "http://[::1"), "--url: must be such as"),
        (("replay", good, "--url", "http://h:99999"), "--url: must be such as"),
        (("replay", good, *url, "--aps", "inf"), "--aps: must be above 0, and finite"),
        (("replay", good, *url, "--timeout", "inf"), "--timeout: must be"),
        (("replay", good, *url, "--slo-ttft", "-1"), "--slo-ttft: must be"),
        (("replay", good, *url, "--latency-scale", "nan"), "--latency-scale: must not"),
        (("replay", good, *url, "--api-key", "a\nb"), "--api-key: must be printable"),
        (("replay", good, *url, "--out", good), "--out: "),
        (("trace", "stats", good, "--aps", "nan"), "--aps: must be above 0"),
        (("replay", good, *url, "--compare", tmp_path / "r"), "cannot be read"),
    ):
        result = invoke(*args)
        assert result.exit_code == 2, args
        assert named in result.stderr, args
        assert len(result.stderr.splitlines()) == 1, args


async def cli(*args: object, **kwargs: Any) -> tuple[int, str, str]:
    """The command in a process of its own."""
    process = await start(*args)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def start(*args: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *map(str, args),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "w.jsonl"
    assert invoke("trace", "synth", path, "--agents", 2, "--turns", 2, "--gen", 3).exit_code == 0
    return path


async def test_two_runs_compare_equal_and_a_third_does_not(tmp_path: Path, trace: Path) -> None:
    async with running(OpenAIServer()) as server:
        args = (trace, "--url", server.url, "--json")
        code, out, err = await cli(*args, "--out", tmp_path / "one")
        assert (code, err) == (0, "")
        first = json.loads(out.splitlines()[-1])
        assert (first["requests"], first["failed"], first["tokens_out"]) == (4, 0, 12)
        assert first["tokens_in"] == 2 * (200 + 403) == sum(map(len, server.prompts))
        assert json.loads((tmp_path / "one" / "result.json").read_bytes()) == first

        code, out, err = await cli(*args, "--compare", tmp_path / "one")
        assert (code, json.loads(out)["tokens_equal"]) == (0, True)

        code, out, err = await cli(*args, "--compare", tmp_path / "one", "--seed", 5)
        assert (code, json.loads(out)["tokens_equal"]) == (1, False)
        assert "agent 0 round 0: the prompts differ" in err

        code, out, err = await cli(*args, "--out", tmp_path / "one")
        assert code == 2
        assert "exists already" in err


async def test_failures_exit_1_with_figures_nevertheless(trace: Path) -> None:
    async with running(OpenAIServer(faults=lambda n, body: "503" if n == 0 else "")) as server:
        code, out, err = await cli(trace, "--url", server.url, "--json", "--agents", 1)
    assert code == 1
    assert err == "first failure: agent 0 round 0: HTTP 503: asked to answer 503\n"
    assert json.loads(out)["failures"] == {"server": 1}
    code, out, err = await cli(trace, "--url", "http://127.0.0.1:9", "--json")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1


async def test_more_agents_than_trajectories_and_chat(tmp_path: Path, trace: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("it was a bright cold day in april and the clocks were striking")
    async with running(OpenAIServer()) as server:
        code, out, _ = await cli(trace, "--url", server.url, "--json", "--agents", 5)
        assert (code, json.loads(out)["requests"]) == (0, 10)
        assert len({tuple(prompt[:64]) for prompt in server.prompts}) == 5
        server.bodies.clear()
        code, out, _ = await cli(trace, "--url", server.url, "--text", text)
        assert code == 0
        assert "agents finished" in out
    assert len(server.bodies) == 4
    assert all(body["messages"][0]["role"] == "user" for body in server.bodies)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_prints_what_was_measured(
    tmp_path: Path, trace: Path, number: signal.Signals
) -> None:
    def faults(number: int, body: dict[str, Any]) -> str:
        return "hang" if len(body["prompt"]) > 200 else ""

    async with running(OpenAIServer(faults=faults)) as server:
        out_dir = tmp_path / "run"
        process = await start(trace, "--url", server.url, "--json", "--out", out_dir)
        await until(lambda: len(server.bodies) == 4)
        process.send_signal(number)
        async with asyncio.timeout(30):
            out, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""
    line = json.loads(out.splitlines()[-1])
    assert line["interrupted"] is True
    assert (line["requests"], line["not_sent"], line["tokens_out"]) == (2, 2, 6)
    assert len(list(read_records(out_dir))) == 2


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited 20 s in vain")
