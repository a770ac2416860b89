"""The timeline is a file that any reader of the Chrome trace format understands."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dualpath.timeline import Timeline

pytestmark = pytest.mark.unit


def read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    assert isinstance(events, list)
    return events


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_spans_keep_their_process_track_and_times(tmp_path: Path, name: str) -> None:
    with Timeline(tmp_path / name, origin_s=10.0) as timeline:
        timeline.span("pe0", "layers", "compute 3", 10.5, 10.75, {"tokens": 64})
        timeline.span("de0", "layers", "load", 11.0, 11.0)
        timeline.instant("pe0", "events", "cancelled", 12.0)
        timeline.counter("pe0", "buffer", 12.5, {"bytes": 7})
    events = read(tmp_path / name)
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in spans] == [(500000.0, 250000.0), (1000000.0, 0.0)]
    assert spans[0]["args"] == {"tokens": 64}
    assert names["process_name", spans[0]["pid"], 0] == "pe0"
    assert names["process_name", spans[1]["pid"], 0] == "de0"
    assert names["thread_name", spans[0]["pid"], spans[0]["tid"]] == "layers"
    assert spans[0]["tid"] != spans[1]["tid"], "a track belongs to its process"
    (counter,) = [e for e in events if e["ph"] == "C"]
    assert counter["pid"] == spans[0]["pid"] and counter["args"] == {"bytes": 7}


def test_an_empty_timeline_is_valid(tmp_path: Path) -> None:
    Timeline(tmp_path / "none.json").close()
    assert read(tmp_path / "none.json") == []


def test_many_threads_and_writes_after_the_end(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "run.json")

    def work(which: int) -> None:
        for step in range(200):
            timeline.span("p", f"t{which}", "s", step, step + 0.5)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    timeline.close()
    timeline.span("p", "t", "late", 0, 1)
    timeline.close()
    events = read(tmp_path / "run.json")
    assert sum(e["ph"] == "X" for e in events) == 800
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "t0", "t1", "t2", "t3",
    }  # fmt: skip
