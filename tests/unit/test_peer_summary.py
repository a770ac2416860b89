"""Peers beside our modes in one summary: figures, ratios, and tokens held to the plain vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualpath.lab.experiments import Case
from dualpath.lab.gathering import REFERENCE
from dualpath.lab.peers.kinds import Peer
from dualpath.lab.peers.running import EXPERIMENT, with_peers
from dualpath.lab.replaying import RunPlace
from dualpath.lab.summing import summarise
from dualpath.report.lab.bounds import Balance, Busy
from dualpath.report.lab.results import RUN, RunResult, Summary, run_folder, write
from dualpath.workload.records import RecordWriter, RequestRecord

pytestmark = pytest.mark.unit

CASE: Case = EXPERIMENT.with_repeats(2).cases[0]
BALANCE = Balance(**dict.fromkeys(Balance.__struct_fields__, 1.0))
JCT_S = {"pe-only": 8.0, "dualpath": 4.0, "nixl": 16.0, "nixl-bidirectional": 2.0,
         "mooncake-store": 10.0}  # fmt: skip


def run(variant: str, repeat: int) -> RunResult:
    return RunResult(
        case=CASE.name, variant=variant, repeat=repeat, mode=variant, policy="",
        figures={"jct_s": JCT_S[variant] + repeat, "failed": 0, "tpot_s": 0.1, "first_error": None},
        nics={}, snic_metric_bytes={}, busy=Busy(seconds=0.0, share=0.0, read_bytes={}),
        snic_max_over_mean=None, bytes_error=None, ttft_split_s={}, cpu_s={},
    )  # fmt: skip


def answer(folder: Path, token: int) -> None:
    with RecordWriter(folder) as writer:
        writer.write(
            RequestRecord(
                agent=0, round=1, name="a", prompt_digest="d", asked_tokens=2, start_s=0.0,
                token_ids=(1, token), completion_tokens=2, text="",
            )
        )  # fmt: skip


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """What our modes left, and the folders of all runs."""
    answer(tmp_path / CASE.name / REFERENCE, 2)
    for variant in JCT_S:
        for repeat in range(CASE.repeats):
            folder = tmp_path / run_folder(CASE.name, variant, repeat)
            answer(folder, 2)
            write(folder / RUN, run(variant, repeat))
    ours = [run(one.name, repeat) for one in CASE.variants for repeat in range(CASE.repeats)]
    return Summary(
        experiment="peers", title="", machine="", snic_bytes_per_s=1.0, cnic_bytes_per_s=1.0,
        tokens_equal=True, first_difference="", cases=[summarise(CASE, ours, 0.9, BALANCE, {})],
    )  # fmt: skip


def test_peers_are_variants_of_the_same_case(summary: Summary, tmp_path: Path) -> None:
    whole = with_peers(summary, CASE, tmp_path)
    (case,) = whole.cases
    assert list(case.variants) == ["pe-only", "dualpath", *(peer.value for peer in Peer)]
    assert case.speedup["dualpath"] == pytest.approx((8 / 4 + 9 / 5) / 2)
    assert case.speedup["nixl"] == pytest.approx((8 / 16 + 9 / 17) / 2)
    assert case.speedup["pe-only"] == 1.0
    assert case.variants["mooncake-store"].jct_runs_s == [10.0, 11.0]
    assert case.checks == summary.cases[0].checks
    assert whole.tokens_equal and whole.first_difference == ""
    assert whole.to_json()["nixl"]["jct_s"] == 16.0


def test_a_peers_wrong_token_is_told(summary: Summary, tmp_path: Path) -> None:
    place = RunPlace(CASE, Peer.NIXL.value, 1, tmp_path)
    (place.folder / "requests.jsonl").unlink()
    answer(place.folder, 3)
    whole = with_peers(summary, CASE, tmp_path)
    assert not whole.tokens_equal
    assert "nixl 2/2" in whole.first_difference and "2 / 3" in whole.first_difference


def test_a_peer_that_was_not_run_is_left_out(summary: Summary, tmp_path: Path) -> None:
    for repeat in range(CASE.repeats):
        (RunPlace(CASE, Peer.MOONCAKE_STORE.value, repeat, tmp_path).folder / RUN).unlink()
    whole = with_peers(summary, CASE, tmp_path)
    assert "mooncake-store" not in whole.cases[0].variants
    assert whole.cases[0].variants["nixl"].tokens_equal is True
    assert whole.tokens_equal is True
