"""One self-contained HTML page: sections of text, tables and SVG plots, no other file needed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #202124; max-width: 1180px;
       margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.4rem; border-bottom: 1px solid #e3e5e8; }
p.lead { color: #5f6368; margin-top: 0; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: #5f6368; font-size: 13px; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: left; padding: .28rem .6rem; border-bottom: 1px solid #eceef0;
         vertical-align: top; }
th { background: #f6f7f8; position: sticky; top: 0; }
td:first-child { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.good { color: #188038; } td.bad { color: #c5221f; font-weight: 600; }
nav a { margin-right: 1rem; } code { background: #f1f3f4; padding: 0 .25rem; }
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. ``good``: green when True, red when False, plain when None."""

    text: str
    number: bool = False
    good: bool | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows; a heading over numbers is aligned like them."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


@dataclass(slots=True)
class Section:
    """A heading with what stands under it, in the order it was added."""

    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, text: str) -> Section:
        """A paragraph of plain text."""
        self.parts.append(f"<p>{html.escape(text)}</p>")
        return self

    def table(self, table: Table) -> Section:
        """A table."""
        numeric = [
            any(isinstance(row[at], Cell) and row[at].number for row in table.rows)  # type: ignore[union-attr]
            for at in range(len(table.head))
        ]
        head = "".join(
            f"<th{' class=number' if number else ''}>{html.escape(name)}</th>"
            for name, number in zip(table.head, numeric, strict=True)
        )
        body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows)
        self.parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return self

    def plot(self, svg: str, caption: str) -> Section:
        """A plot made by ``report.plots``."""
        self.parts.append(f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>")
        return self


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    anchors = [f"s{index}" for index in range(len(sections))]
    nav = "".join(
        f'<a href="#{anchor}">{html.escape(section.title)}</a>'
        for anchor, section in zip(anchors, sections, strict=True)
    )
    body = "".join(
        f'<h2 id="{anchor}">{html.escape(section.title)}</h2>{"".join(section.parts)}'
        for anchor, section in zip(anchors, sections, strict=True)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>'
        f"<nav>{nav}</nav>{body}</body></html>\n"
    )


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f"<td>{html.escape(cell)}</td>"
    names = ["number"] if cell.number else []
    if cell.good is not None:
        names.append("good" if cell.good else "bad")
    attribute = f' class="{" ".join(names)}"' if names else ""
    return f"<td{attribute}>{html.escape(cell.text)}</td>"
