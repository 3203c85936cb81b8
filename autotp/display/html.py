"""Sections as HTML for notebooks: plain tables and `<details>`, no script, no style sheet, under 100 kB."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autotp.display.sections import Section, Table
from autotp.display.text import labelled

LIMIT = 95_000
_CELL = ' style="text-align:left;vertical-align:top"'
_RIGHT = ' style="text-align:right;vertical-align:top"'


def html(sections: Sequence[Section]) -> str:
    """All sections; rows that would make it larger than a notebook should hold are counted instead."""
    budget = LIMIT - sum(len(_section(section, 0)) for section in sections)
    parts = []
    for section in sections:
        text = _section(section, max(0, budget))
        budget -= len(text) - len(_section(section, 0))
        parts.append(text)
    return "<div>" + "".join(parts) + "</div>"


def _section(section: Section, budget: int) -> str:
    body = f"<pre>{escape(chr(10).join(labelled(section)))}</pre>" if section.lines else ""
    if section.table:
        body += _table(section.table, budget)
    if section.table or section.fold:
        opened = "" if section.fold else " open"
        return f"<details{opened}><summary><b>{escape(section.title)}</b></summary>{body}</details>"
    return f"<p><b>{escape(section.title)}</b></p>{body}"


def _table(table: Table, budget: int) -> str:
    head = "".join(f"<th{_CELL}>{escape(header)}</th>" for header in table.headers)
    rows: list[str] = []
    for row in table.rows:
        text = "<tr>" + "".join(_cell(table, i, cell) for i, cell in enumerate(row)) + "</tr>"
        budget -= len(text)
        if budget < 0:
            break
        rows.append(text)
    left = len(table.rows) - len(rows)
    more = f"<p>and {left:,} more rows: print(str(...)) shows all</p>" if left else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"


def _cell(table: Table, column: int, cell: str) -> str:
    # Zero-width breaks let the browser wrap a long name after its dots.
    text = escape(cell).replace(".", ".<wbr>") if column == 0 else escape(cell)
    return f"<td{_RIGHT if column in table.right else _CELL}>{text}</td>"
