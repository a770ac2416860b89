"""Timelines of several processes, drawn one by one and opened together."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dualpath.cli.main import run
from dualpath.serve.record import Phase, Record, RecordLog
from dualpath.spans import Spans, events, merge, spans_for

pytestmark = pytest.mark.unit


def tracks(path: Path) -> dict[str, list[dict[str, object]]]:
    """Spans by ``process/track``."""
    found = json.loads(path.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    result: dict[str, list[dict[str, object]]] = {}
    for event in found:
        if event["ph"] == "X":
            track = f"{processes[event['pid']]}/{names[event['pid'], event['tid']]}"
            result.setdefault(track, []).append(event)
    return result


def test_none_without_a_folder() -> None:
    assert spans_for("", "pe0") is None


def test_overlapping_spans_get_tracks_of_their_own(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "new", "pe0")
    for start, end in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.6), (5.0, 6.0)):
        spans.lane("push", f"{start}", start, end)
    spans.close()
    target = tmp_path / "all.json"
    merge(tmp_path / "new", target)
    found = tracks(target)
    assert {track: [e["name"] for e in spans] for track, spans in found.items()} == {
        "pe0/push 1": ["0.0", "2.0", "5.0"],
        "pe0/push 2": ["1.0"],
        "pe0/push 3": ["2.5"],
    }


def test_merged_files_share_a_clock_and_keep_processes_apart(tmp_path: Path) -> None:
    now = time.monotonic()
    for number, name in enumerate(("pe0", "de0")):
        with_spans = Spans(tmp_path, name)
        with_spans.span("t", "x", now + number, now + number + 0.5, {"a": 1})
        with_spans.close()
    target = tmp_path / "out.json"
    assert merge(tmp_path, target) == 6
    found = tracks(target)
    assert set(found) == {"pe0/t", "de0/t"}
    (first,), (second,) = found["pe0/t"], found["de0/t"]
    assert first["ts"] == 0.0
    assert second["ts"] == pytest.approx(1e6, abs=2000)
    assert first["dur"] == pytest.approx(5e5, abs=1)
    assert first["args"] == {"a": 1}


def test_a_killed_writers_file_is_taken_as_far_as_it_goes(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "pe0")
    for number in range(3):
        spans.span("t", str(number), number, number + 1)
    spans.close()
    (file,) = tmp_path.glob("*.trace.json")
    whole = file.read_text()
    file.write_text(whole[: whole.rindex('"name"')])
    names = [event["name"] for event in events(file) if event["ph"] == "X"]
    assert names == ["0", "1"]
    (tmp_path / "killed-at-once.trace.json").touch()
    assert merge(tmp_path, tmp_path / "out.json") == 4


def test_merge_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.trace\.json"):
        merge(tmp_path, tmp_path / "out.json")
    (tmp_path / "x.trace.json").write_text("{}")
    with pytest.raises(ValueError, match="not a timeline"):
        merge(tmp_path, tmp_path / "out.json")


def test_command_merges_or_says_in_one_line_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["timeline", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    spans = Spans(tmp_path, "pe0")
    spans.span("t", "x", 0.0, 1.0)
    spans.close()
    assert run(["timeline", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["events"] == 3
    assert len(list(events(Path(told["file"])))) == 3


def test_a_request_is_drawn_with_its_phases(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "front")
    log = RecordLog(spans)
    record = Record(rid="0123456789ab", endpoint="completions", mode="split", outcome="ok")
    with record.timed(Phase.SCHEDULE):
        pass
    with record.timed(Phase.PREFILL):
        pass
    log.add(record)
    log.close()
    merge(tmp_path, tmp_path / "out.json")
    (found,) = tracks(tmp_path / "out.json").values()
    assert [event["name"] for event in found] == ["ok", "schedule", "prefill", "decode"]
    assert all(e["ts"] >= found[0]["ts"] for e in found)  # type: ignore[operator]
    assert "moments" not in record.as_dict()
