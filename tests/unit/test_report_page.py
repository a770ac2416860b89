"""Pages stand alone and show what they were given."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from dualpath.report.page import Cell, Section, Table, page
from dualpath.report.plots import Panel, bars, lines

pytestmark = pytest.mark.unit

SVG = "{http://www.w3.org/2000/svg}"
PANEL = Panel(
    "a <title>", "agents", "s", ["512", "1,024"], {"basic": [3, 4], "dualpath": [2, None]}
)


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.data: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.sources += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]

    def handle_data(self, data: str) -> None:
        self.data.append(data.strip())


@pytest.mark.parametrize("draw", [bars, lines])
def test_a_plot_is_svg_whose_text_is_text(draw) -> None:  # type: ignore[no-untyped-def]
    svg = draw([PANEL, PANEL])
    root = ET.fromstring(svg)
    assert root.tag == SVG + "svg"
    texts = [element.text for element in root.iter(SVG + "text")]
    assert texts.count("a <title>") == 2
    assert texts.count("basic") == 1, "one legend for all panels"


def test_equal_input_gives_equal_bytes() -> None:
    assert bars([PANEL], stacked=True) == bars([PANEL], stacked=True)


def test_marks_and_limits_are_drawn() -> None:
    svg = lines([Panel("t", "x", "y", [1.0, 2.0], {"a": [1, 2]}, 10, {"limit": 4})])
    assert "limit" in [e.text for e in ET.fromstring(svg).iter(SVG + "text")]


def test_a_series_of_the_wrong_length_is_named() -> None:
    with pytest.raises(ValueError, match="t: basic has 1 values for 2 places"):
        bars([Panel("t", "x", "y", ["a", "b"], {"basic": [1]})])
    with pytest.raises(ValueError, match="at least one panel"):
        bars([])


def test_a_page_needs_no_other_file_and_escapes_its_text() -> None:
    section = (
        Section("Rows & columns")
        .text("1 < 2")
        .table(Table(["name", "value"], [["<b>", Cell("1.0", number=True, good=False)]]))
        .plot(bars([PANEL]), "what it shows")
    )
    reader = Reader(page("T", "lead", [section]))
    assert all(source.startswith("#") for source in reader.sources), reader.sources
    assert {"1 < 2", "<b>", "Rows & columns", "what it shows"} <= set(reader.data)
    assert reader.open.count("svg") == 1 and reader.open.count("td") == 2
