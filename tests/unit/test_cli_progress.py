"""Long commands say without a terminal, too, that they go on: rarely, and in plain lines."""

from __future__ import annotations

import re
import time

import pytest

from dualpath.cli import common, replay
from dualpath.workload import Progress

pytestmark = pytest.mark.unit


def test_a_replay_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report_twice() -> str:
        with replay.replay_progress("replay") as report:
            for done in (3, 4):
                report(Progress(done, 10, 1, 2, 1, 77))
        return capsys.readouterr().err

    assert report_twice() == ""  # half a minute has not passed
    monkeypatch.setattr(replay, "_LINE_EVERY_S", 0.0)
    assert report_twice().splitlines() == [
        f"replay: {done}/10 requests, agents 1/2, 77 tokens out, 1 failed" for done in (3, 4)
    ]


def test_work_that_says_nothing_by_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with common.working("reading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(common, "STILL_EVERY_S", 0.02)
    text, end_s = "", time.monotonic() + 10
    with common.working("reading"):
        while "so far" not in text and time.monotonic() < end_s:
            time.sleep(0.02)
            text += capsys.readouterr().err
    assert re.fullmatch(r"reading: for \d+ s so far", text.splitlines()[0])
