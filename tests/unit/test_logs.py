"""Log lines for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from dualpath import logs
from dualpath.config import LogConfig, LogFormat
from dualpath.serve.record import Record, RecordLog

pytestmark = pytest.mark.unit


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What our loggers write as JSON."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.formatter(LogConfig(format=LogFormat.JSON), "pe3"))
    logger = logging.getLogger("dualpath")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield out
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_request_is_one_line_of_fields(lines: io.StringIO) -> None:
    record = Record(rid="abc", endpoint="/v1/completions", mode="dualpath", hit_tokens=64)
    RecordLog().add(record)
    (line,) = lines.getvalue().splitlines()
    fields = json.loads(line)
    assert fields["rid"] == "abc"
    assert fields["hit_tokens"] == 64
    assert fields["logger"] == "dualpath.requests"
    assert fields["process"] == "pe3"
    assert "message" not in fields


def test_a_line_about_a_request_has_its_id_and_the_fault(lines: io.StringIO) -> None:
    logger = logging.getLogger("dualpath.test")
    try:
        raise ValueError("what\nfollows")
    except ValueError:
        logger.exception("request %s failed", "abc", extra={"rid": "abc"})
    (line,) = lines.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["rid"], fields["message"]) == ("abc", "request abc failed")
    assert fields["level"] == "error"
    assert "ValueError: what\nfollows" in fields["exception"]
    assert fields["time"].endswith("Z")


def test_text_names_the_engine() -> None:
    record = logging.LogRecord("dualpath.x", logging.WARNING, "f", 1, "hm", None, None)
    text = logs.formatter(LogConfig(), "de0").format(record)
    assert text.endswith(" WARNING de0 dualpath.x: hm")
    assert logs.formatter(LogConfig()).format(record).endswith(" WARNING dualpath.x: hm")


def test_an_engine_is_set_up_once() -> None:
    ours = logging.getLogger("dualpath")
    before, propagate, level = list(ours.handlers), ours.propagate, ours.level
    try:
        for _ in range(2):
            logs.set_up_engine(LogConfig(level="warning"), "de0")
        assert len(ours.handlers) == len(before) + 1
        assert ours.level == logging.WARNING
    finally:
        ours.handlers[:], ours.propagate = before, propagate
        ours.setLevel(level)


@pytest.mark.parametrize("chosen", list(LogFormat))
def test_the_front_logs_in_the_format_chosen(chosen: LogFormat) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    root = logging.getLogger()
    level = root.level
    try:
        logs.set_up(LogConfig(format=chosen, level="warning"), handler)
        logging.getLogger("dualpath.somewhere").info("not written")
        logging.getLogger("dualpath.somewhere").warning("written")
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    (line,) = out.getvalue().splitlines()
    if chosen is LogFormat.JSON:
        assert json.loads(line)["message"] == "written"
    else:
        assert line.endswith("WARNING dualpath.somewhere: written")
