"""``dualpath trace``: convert, synth and stats as a user calls them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli.main import run
from dualpath.workload.blocks import Sharing, encode_blocks, prompt_blocks
from dualpath.workload.synth import ROWS, synthesise
from dualpath.workload.trace import Round, read_trace

pytestmark = pytest.mark.unit

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
LOG = [
    {"timestamp": 0, "input_length": 1100, "output_length": 100, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1500, "output_length": 50, "hash_ids": [0, 3, 4]},
    {"timestamp": 5000, "input_length": 1300, "output_length": 10, "hash_ids": [0, 1, 5]},
]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["trace", *arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return dict(json.loads(line))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in LOG))
    return path


def test_convert_and_stats(capsys: pytest.CaptureFixture[str], tmp_path: Path, log: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    made = answer(capsys, "convert", str(log), str(out))
    assert (made["format"], made["trajectories"], made["requests"]) == ("mooncake", 2, 3)
    assert (made["dropped"], made["clamped_appends"]) == (0, 0)
    assert {item.id: item.rounds for item in read_trace(out)} == {
        "mc00000": (Round(1100, 100, 5.0), Round(100, 10, None)),
        "mc00001": (Round(1500, 50, None),),
    }
    found = answer(
        capsys, "stats", str(out), "--sharing", "--aps", "2", "--ttft", "1", "--tpot", "0",
        "--model", "qwen2.5-32b",
    )  # fmt: skip
    assert found["sharing"]["shared_tokens"] == 512
    assert found["sharing"]["hit_ratio"] == (1200 + 512) / 3900
    tokens = 2 * (1100 + 1300 + 1500 + 5 * 1200) / 2
    assert found["working_set"]["tokens"] == pytest.approx(tokens)
    assert found["working_set"]["bytes"] == pytest.approx(tokens * 262_144)
    assert run(["trace", "stats", str(out), "--sharing", "--aps", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "512 tokens more" in shown
    assert "working set" in shown


def test_convert_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, log: Path) -> None:
    out = tmp_path / "out.jsonl"
    made = answer(
        capsys, "convert", str(log), str(out), "--min-rounds", "2", "--times", "3", "--no-blocks",
        "--tool-latency", "constant:9",
    )  # fmt: skip
    assert (made["trajectories"], made["dropped"]) == (3, 1)
    first, copied, _ = read_trace(out)
    assert first.rounds == (Round(1100, 100, 9.0), Round(100, 10, None))
    assert copied.rounds == (Round(64, 1, 9.0), *first.rounds)
    assert "blocks" not in first.extra
    again = tmp_path / "again.jsonl"
    made = answer(
        capsys, "convert", str(out), str(again), "--max-tokens", "1200", "--limit", "1",
        "--format", "dualpath",
    )  # fmt: skip
    assert [item.rounds for item in read_trace(again)] == [(Round(1100, 100, None),)]


def test_convert_goes_through_public_traces_unchanged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = TRACES / "mooncake_conversation.jsonl.gz"
    if not source.exists():
        pytest.skip("no public traces here (looked in ../shared/traces)")
    out = tmp_path / "out.jsonl.gz"
    made = answer(capsys, "convert", str(source), str(out))
    assert (made["format"], made["trajectories"]) == ("dualpath", 756)
    assert list(read_trace(out)) == list(read_trace(source))


def test_block_ids_of_a_public_trace() -> None:
    source = TRACES / "mooncake_conversation.jsonl.gz"
    if not source.exists():
        pytest.skip("no public traces here (looked in ../shared/traces)")
    sharing = Sharing()
    for trajectory in read_trace(source):
        prompts = list(prompt_blocks(trajectory))
        assert encode_blocks(prompts) == trajectory.extra["blocks"]
        for ids, length in zip(prompts, trajectory.prompts_tokens(), strict=True):
            assert abs(len(ids) - length / 512) < 3 + len(prompts)
        sharing.feed(trajectory)
    # The first block, a system prompt, is everybody's.
    assert sharing.shared_first_tokens >= 755 * 512


def test_synth(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    made = answer(
        capsys, "synth", str(out), "--row", "32k", "--agents", "3", "--times", "2",
        "--tool-latency", "uniform:1:2",
    )  # fmt: skip
    assert made["trajectories"] == 6
    assert 1 < made["tool_latency_s"] < 2
    plain = list(islice(synthesise(ROWS["32k"]), 3))
    found = list(read_trace(out))
    assert [item.id for item in found[:3]] == [item.id for item in plain]
    assert [len(item.rounds) for item in found[3:]] == [len(item.rounds) + 1 for item in plain]
    made = answer(capsys, "synth", str(out), "--tool-latency", "11", "--agents", "40")
    assert made["tool_latency_s"] == pytest.approx(11 * 2.05, rel=0.6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["convert", "absent", "out.jsonl"], "absent: cannot be read"),
        (["convert", "log.jsonl", "out.jsonl", "--format", "zip"], "--format: 'zip' is not one"),
        (["convert", "log.jsonl", "out.jsonl", "--format", "openai"], "no trajectories are left"),
        (["convert", "log.jsonl", "out.jsonl", "--max-tokens", "10"], "no trajectories are left"),
        (["convert", "log.jsonl", "no/folder/out.jsonl"], "cannot be written"),
        (["convert", "log.jsonl", "out.jsonl", "--tool-latency", "x:1"], "latency: 'x'"),
        (["convert", "log.jsonl", "out.jsonl", "--times", "0"], "--times"),
        (["synth", "out.jsonl", "--tool-latency", "x:1"], "--tool-latency: 'x'"),
        (["synth", "out.jsonl", "--row", "99k"], "--row: '99k' is not one of"),
        (["stats", "good.jsonl", "--aps", "0"], "--aps: must be above 0"),
        (["stats", "good.jsonl", "--model", "nope"], "--model: nope: cannot be read"),
        (["stats", "log.jsonl"], "log.jsonl:1: id: is missing"),
        (["stats", "good.jsonl", "--sharing", "--aps", "x"], "--aps"),
        (["stats", "bad_blocks.jsonl", "--sharing"], "a: block: must be a positive integer"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: Path,
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    good = '{"id": "a", "rounds": [[1, 1, null]]}\n'
    Path("good.jsonl").write_text(good)
    Path("bad_blocks.jsonl").write_text(good.replace("{", '{"blocks": [[0, [[0, 1]]]], '))
    assert run(["trace", *arguments]) == 2
    err = capsys.readouterr().err
    assert named in err
    assert len(err.splitlines()) == 1
    assert not Path("out.jsonl").exists()
