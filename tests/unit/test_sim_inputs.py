"""Odd traces, descriptions and commands: the right figures, or one clear line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from sim_kit import agent, small

from dualpath.cli import main
from dualpath.sim import MODELS, MODES, ClusterSpec, EngineCost, preset, simulate
from dualpath.sim.files import SpecError, read_spec
from dualpath.workload.trace import write_trace

pytestmark = pytest.mark.unit

DESCRIPTION = """
name = "mine"
mode = "basic"
quota_s = 0.2
[cluster]
prefill_nodes = 1
decode_nodes = 2
gpus_per_node = 4
snic_bytes_per_s = 1e9
snic_scale = { de1 = 0.5 }
failures = [["de1", 20.0]]
[model]
num_layers = 4
flops_per_token = 1000000
kv_bytes_per_token = 1024
[engine]
flops_per_s = 1e12
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.run(["simulate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


# ---- traces ------------------------------------------------------------------------------------


def test_one_round_of_one_token() -> None:
    result = simulate(small(), [agent("a", (1, 1))])
    assert (result.requests, result.tokens_in, result.tokens_out, result.hit_tokens) == (1, 1, 1, 0)
    assert result.ttst is None and result.tpot is None and result.ttft is not None


def test_nothing_appended_and_nothing_generated() -> None:
    """A prompt that is all stored computes its last token again, in a whole block."""
    result = simulate(small(), [agent("a", (128, 0), (0, 0), (0, 1))])
    assert result.requests == 3 and result.tokens_out == 1
    assert result.hit_tokens == 64 + 64
    assert result.computed_tokens == 128 + 64 + 64


@pytest.mark.parametrize("mode", ["dualpath", "oracle"])
def test_a_million_tokens(mode: str) -> None:
    result = simulate(
        preset("ds-660b-1p1d", mode), [agent("a", (1_000_000, 10), (100, 10))], agents=2
    )
    assert result.failed == 0 and result.requests == 5  # the second comes behind a synthetic round
    assert result.hit_tokens > 2 * 999_936 - 64


def test_longer_than_memory_fails_and_says_so() -> None:
    """12 GB of PE memory hold 279,000 tokens of all layers: too few for Basic, not for the rest."""
    result = simulate(preset("ds-660b-1p1d", "basic"), [agent("a", (1_000_000, 10), (100, 10))])
    assert result.failed == 1 and result.requests == 0 and result.agents_done == 0
    assert result.ttft is None and result.jct is None
    # Longer than a DE's memory: the scheduler's own refusal.
    result = simulate(preset("ds-660b-1p1d"), [agent("a", (2_000_000, 10)), agent("b", (100, 10))])
    assert result.failed == 1 and result.agents_done == 1


def test_no_trajectories() -> None:
    with pytest.raises(ValueError, match="trajectories: there are none"):
        simulate(small(), [])


def test_copies_have_blocks_of_their_own() -> None:
    """Three agents of one trajectory: two come behind a synthetic round, none hits another's."""
    one = simulate(small(), [agent("a", (640, 1))])
    three = simulate(small(), [agent("a", (640, 1))], agents=3)
    assert one.hit_tokens == 0 and three.requests == 5
    assert three.hit_tokens == 2 * 64  # its own synthetic round


# ---- the command -------------------------------------------------------------------------------


def test_command_prints_the_contract(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl.gz"
    write_trace(trace, [agent("a", (500, 20), (60, 20)), agent("b", (900, 5))])
    out, timeline, log = tmp_path / "out", tmp_path / "t.json", tmp_path / "d.jsonl"
    arguments = ["--preset", "ds-27b-1p1d", "--mode", "split", "--trace", str(trace), "--json"]
    files = ["--out", str(out), "--timeline", str(timeline), "--decision-log", str(log)]
    assert main.run(["simulate", *arguments, *files, "--agents", "5"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line["ttft_s"]) == {"mean", "p50", "p99"}
    assert line["requests"] == 3 + 5 + 3 and line["failed"] == 0
    assert line["mode"] == "split" and set(line["path"]) == {"pe", "de", "split"}
    assert set(line["snic"]) == {"pe0", "de0"}
    assert sum(line["snic"].values()) == line["path"]["pe"] + line["path"]["de"]
    assert line["tpot_s"] == pytest.approx(0.0102, rel=0.05) and line["jct_s"] > 0
    spans = [event for event in json.loads(timeline.read_text()) if event["ph"] == "X"]
    assert {"step", "a0"} <= {event["name"] for event in spans}
    assert (
        sum(text.startswith('{"event":"submitted"') for text in log.read_text().splitlines()) == 11
    )
    parquet = pytest.importorskip("pyarrow.parquet")
    requests = parquet.read_table(out / "requests.parquet").to_pydict()
    assert len(requests["ttft_s"]) == 11
    assert sum(requests["ttft_s"]) / 11 == pytest.approx(line["ttft_s"]["mean"])
    windows = parquet.read_table(out / "snic.parquet").to_pydict()
    assert sum(windows["pe0"]) + sum(windows["de0"]) == pytest.approx(sum(line["snic"].values()))
    assert json.loads((out / "result.json").read_text())["requests"] == 11


def test_command_shows_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(DESCRIPTION)
    assert main.run(["simulate", "--config", str(path), "--trace", "32k", "--agents", "2"]) == 0
    out = capsys.readouterr().out
    assert "mine basic" in out and "TTFT" in out and "allocate" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "gpt-9-1p1d"), "gpt-9-1p1d"),
        (("--preset", "ds-27b-0p1d"), "ds-27b-0p1d"),
        (("--mode", "fast"), "mode: 'fast'"),
        (("--calibration", "C9"), "C9"),
        (("--aps", "0"), "aps must be above 0"),
        (("--trace", "/nowhere/t.jsonl"), "/nowhere/t.jsonl: cannot be read"),
        (("--config", "/nowhere/c.toml"), "/nowhere/c.toml: cannot be read"),
        (("--config", "c.toml", "--preset", "ds-27b-1p1d"), "--preset: has no meaning"),
        (("--timeline", "/nowhere/t.json"), "/nowhere/t.json: cannot be written"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", "rounds": [[5, 1, -2.0]]}', "rounds[0][2]"),
        ('{"id": "a", "rounds": [[-5, 1, null]]}', "rounds[0][0]"),
        ('{"id": "a", "rounds": []}', "rounds"),
        ('{"id": "a", "rounds": [[0, 1, null]]}', "at least 1 token"),
    ],
)
def test_bad_trace_lines(
    line: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "ok", "rounds": [[5, 1, null]]}\n' + line + "\n")
    message = refused(capsys, "--trace", str(path))
    assert f"{path}:2" in message and said in message


def test_cut_gzip(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    packed = gzip.compress(b'{"id": "a", "rounds": [[5, 1, null]]}\n' * 2000)
    path.write_bytes(packed[: len(packed) // 2])
    assert "gzip" in refused(capsys, "--trace", str(path), "--agents", "4000")


# ---- descriptions ------------------------------------------------------------------------------


def test_description(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(DESCRIPTION)
    spec = read_spec(path)
    assert spec.name == "mine" and spec.features is not None and spec.features.name == "basic"
    assert spec.quota_s == 0.2 and spec.model.kv_bytes_per_token == 1024
    assert spec.cluster.failures == (("de1", 20.0),) and spec.cluster.snic_scale == {"de1": 0.5}
    path.write_text('preset = "ds-27b-1p2d"\n[cluster]\nde_buffer_bytes = 1e9\n')
    changed, plain = read_spec(path), preset("ds-27b-1p2d")
    assert changed.cluster.de_buffer_bytes == 1e9
    assert changed.model == plain.model and changed.engine == plain.engine
    assert changed.features == MODES["dualpath"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("quota_s = 0.2", "quota_s = 0.0|quota_s must be above 0"),
        ("quota_s = 0.2", "quota = 0.2|quota: is not a field"),
        ("quota_s = 0.2", "quota_step_tokens = 0|quota_step_tokens must be above 0"),
        ("gpus_per_node = 4", 'gpus_per_node = "4"|cluster.gpus_per_node'),
        ("decode_nodes = 2", "|decode_nodes"),
        ("de1 = 0.5", "de7 = 0.5|snic_scale: 'de7'"),
        ('mode = "basic"', 'mode = "fast"|mode: '),
        ("flops_per_s = 1e12", "flops_per_s = 1e12\nspeed = 2|engine.speed: is not a field"),
        ("kv_bytes_per_token = 1024", "|model.kv_bytes_per_token: is missing"),
    ],
)
def test_bad_descriptions(change: str, said: str, tmp_path: Path) -> None:
    new, message = said.split("|")
    path = tmp_path / "c.toml"
    path.write_text(DESCRIPTION.replace(change, new))
    with pytest.raises(SpecError) as caught:
        read_spec(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and message in text and "\n" not in text


def test_figures_are_checked() -> None:
    with pytest.raises(ValueError, match="snic_bytes_per_s"):
        ClusterSpec(1, 1, snic_bytes_per_s=-1.0)
    with pytest.raises(ValueError, match="prefill_nodes"):
        ClusterSpec(0, 1)
    for names in (("a",), ("a", "a"), ("a", "a", "b")):
        with pytest.raises(ValueError, match="names must be 2 different ones"):
            ClusterSpec(1, 1, names=names)
    with pytest.raises(ValueError, match="attention_share"):
        EngineCost(1e12, 1.5)
    with pytest.raises(ValueError, match="decode_step_s"):
        EngineCost(1e12, decode_step_s=float("nan"))
    with pytest.raises(ValueError, match="decode_knee_requests"):
        EngineCost(1e12, decode_knee_requests=float("nan"))


def test_large_batches_of_a_calibration() -> None:
    """C3 is C2 up to nine requests a GPU, and DeepSeek's service at 88: 21 tokens a second each."""
    line, bent = (preset("ds-660b-2p4d", calibration=name).engine for name in ("C2", "C3"))
    for requests in (0, 4, 9):
        assert bent.decode_added_s(requests) == line.decode_added_s(requests)
    far = 14_800 / 8 / 21
    assert bent.decode_step_s + bent.decode_added_s(far) == pytest.approx(1 / 21)
    assert line.decode_step_s + line.decode_added_s(far) == pytest.approx(0.173, abs=0.001)
    assert bent.flops_per_s == line.flops_per_s


@pytest.mark.parametrize("model", MODELS)
def test_presets(model: str) -> None:
    spec = preset(f"{model}-2p4d", "basic", "C2")
    assert (spec.cluster.prefill_nodes, spec.cluster.decode_nodes) == (2, 4)
    assert spec.cluster.gpus == 48 and spec.features.name == "basic"
