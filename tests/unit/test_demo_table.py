"""The demo's verdict and its line for scripts, from runs as the replay client gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dualpath.cli.demo_table import Outcome, say_problems, show
from dualpath.workload import Conversation, ReplayResult, RequestRecord, compare
from dualpath.workload.front import FrontTotals
from dualpath.workload.measure import Meter

pytestmark = pytest.mark.unit

REPLAY_KEYS = {
    "jct_s", "ttft_s", "ttst_s", "tpot_s", "requests", "failed", "tokens_in", "tokens_out",
    "snic", "path", "mode",
}  # fmt: skip
TALKS = [Conversation(name="Ada, tea", users=("How hot?",), max_tokens=(3,))]


def result(mode: str | None, tokens: tuple[int, ...], snic: dict[str, int]) -> ReplayResult:
    record = RequestRecord(
        agent=0, round=0, name="Ada, tea", prompt_digest="d", asked_tokens=3, start_s=0.0,
        prompt_tokens=100, cached_tokens=64, completion_tokens=len(tokens), token_ids=tokens,
        text="Very hot.", ttft_s=1.0, ttst_s=0.1, tpot_s=0.1, total_s=2.0,
    )  # fmt: skip
    meter = Meter(4.0, 0.05)
    meter.request(record)
    meter.agent_done(2.0 if mode == "dualpath" else 3.0)
    totals = (
        FrontTotals(mode=mode, snic=snic, path={"pe": 1, "de": 1, "split": 0}) if mode else None
    )
    figures = meter.figures(
        agents=1, not_sent=0, duration_s=3.0, front=totals, aps=None, seed=0, interrupted=False
    )
    return ReplayResult(figures, (record,))


def outcome(
    dual_tokens: tuple[int, ...] = (1, 2, 3), dual_snic: dict[str, int] | None = None
) -> Outcome:
    plain = result(None, (1, 2, 3), {})
    basic = result("basic", (1, 2, 3), {"p": 1000, "d": 0})
    dual = result("dualpath", dual_tokens, dual_snic or {"p": 600, "d": 400})
    verdicts = {
        "basic": compare(plain.records, basic.records),
        "dualpath": compare(plain.records, dual.records),
    }
    return Outcome(plain, basic, dual, verdicts)


def test_a_good_run(capsys: pytest.CaptureFixture[str]) -> None:
    made = outcome()
    assert made.good
    say_problems(made)
    assert capsys.readouterr().err == ""
    show(made, TALKS, "40Mbit/s")
    out = capsys.readouterr().out
    assert "Ada, tea: How hot?" in out
    assert "Very hot." in out
    assert "equal" in out and "DIFFERENT" not in out
    assert "1.50" in out  # 3 s against 2 s


def test_the_line_for_scripts_has_replays_keys_in_every_mode() -> None:
    line: dict[str, Any] = json.loads(json.dumps(outcome().to_json()))
    assert line["tokens_equal"] is True
    assert line["snic_agree"] is True
    assert line["jct_ratio"] == 1.5
    for mode in ("basic", "dualpath"):
        assert set(line[mode]) >= REPLAY_KEYS
        assert line[mode]["mode"] == mode


def test_one_different_token_fails_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = outcome(dual_tokens=(1, 2, 4))
    assert not made.tokens_equal
    assert not made.good
    assert made.to_json()["first_difference"]["dualpath"] == "agent 0 round 0: token 2: 3 / 4"
    say_problems(made)
    assert "dualpath: tokens differ from plain vLLM's" in capsys.readouterr().err
    show(made, TALKS, "40Mbit/s")
    assert "DIFFERENT" in capsys.readouterr().out


def test_different_storage_reads_fail_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = outcome(dual_snic={"p": 600, "d": 370})
    assert made.tokens_equal
    assert not made.good
    say_problems(made)
    assert "1000 and 970 bytes" in capsys.readouterr().err
