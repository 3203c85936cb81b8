"""Sections as text: plain and aligned for pipes and `str()`, in boxes that fit for a terminal.

A name is never cut off. On a terminal, where space is short: long texts wrap; then they move
below the table and leave a number behind; then droppable columns go, and a line says so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from autotp.display.sections import Section, Table
from autotp.folding import split_pattern

_NOTES_MIN, _NAME_MIN, _NAME_LEAST, _GAP = 32, 28, 12, 3
_COLOURS = {"good": "green", "warning": "yellow", "error": "bold red", "quiet": "dim"}


def plain(sections: Sequence[Section]) -> str:
    """All of it, aligned with spaces, no boxes and no width limit."""
    return "\n\n".join(_plain_section(section) for section in sections)


def _plain_section(section: Section) -> str:
    lines = [section.title] if section.title else []
    lines += labelled(section)
    if section.table:
        lines += [f"  {line}" for line in _plain_table(section.table)]
    return "\n".join(line.rstrip() for line in lines)


def labelled(section: Section) -> list[str]:
    """The lines, indented, their texts in one column after the labels."""
    width = _label_width(section)
    return [f"  {label:<{width}}{text}" for label, text in section.lines]


def _label_width(section: Section) -> int:
    longest = max((len(label) for label, _ in section.lines), default=0)
    return longest + 2 if longest else 0


def _plain_table(table: Table) -> list[str]:
    widths = _natural(table)
    return [
        "  ".join(
            cell.rjust(width) if i in table.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (table.headers, *table.rows)
    ]


def _natural(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.headers, *table.rows, strict=True)]


def boxed(sections: Sequence[Section], width: int) -> RenderableType:
    """Laid out for a terminal of this width."""
    parts: list[RenderableType] = []
    for section in sections:
        parts.append(Text(_wrap(section.title, width), style="bold"))
        tones = section.tones or ("",) * len(section.lines)
        hang = 2 + (_label_width(section) or 2)
        parts += [
            Text(_wrap(line, width, indent=hang), style=_COLOURS.get(tone, ""))
            for line, tone in zip(labelled(section), tones, strict=True)
        ]
        if section.table:
            parts += _boxed_table(fit(section.table, width))
        parts.append(Text())
    return Group(*parts[:-1])


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A table with the widths its columns get, the texts moved below it, and the headers left out."""

    table: Table
    widths: tuple[int, ...]
    below: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def fit(table: Table, width: int) -> Fitted:
    """Choose widths, and what has to give way, so that the table is not wider than `width`."""
    notes = table.notes
    if notes is not None:
        rest = _spare(table, width, notes)
        if rest >= min(_NOTES_MIN, _natural(table)[notes]):
            return _with_width(table, notes, rest)
        table, below = _number_notes(table, notes)
    else:
        below = ()
    dropped: list[str] = []
    for column in sorted(table.droppable, reverse=True):
        if _spare(table, width, 0) >= min(_NAME_MIN, _natural(table)[0]):
            break
        dropped.append(table.headers[column])
        table = _without(table, column)
    fitted = _with_width(table, 0, max(_NAME_LEAST, _spare(table, width, 0)))
    return Fitted(table=fitted.table, widths=fitted.widths, below=below, dropped=tuple(dropped))


def _spare(table: Table, width: int, column: int) -> int:
    """What is left for one column when all the others have what they need."""
    natural = _natural(table)
    return width - _GAP * (len(natural) - 1) - sum(natural) + natural[column]


def _with_width(table: Table, column: int, width: int) -> Fitted:
    widths = _natural(table)
    widths[column] = min(widths[column], width)
    return Fitted(table=table, widths=tuple(widths))


def _number_notes(table: Table, notes: int) -> tuple[Table, tuple[str, ...]]:
    texts = list(dict.fromkeys(row[notes] for row in table.rows if row[notes]))
    number = {text: f"[{i}]" for i, text in enumerate(texts, 1)}
    rows = tuple((*row[:notes], number.get(row[notes], ""), *row[notes + 1 :]) for row in table.rows)
    return replace(table, rows=rows), tuple(f"{number[text]} {text}" for text in texts)


def _without(table: Table, column: int) -> Table:
    def shift(i: int | None) -> int | None:
        return i if i is None or i < column else i - 1

    keep = [i for i in range(len(table.headers)) if i != column]
    return Table(
        headers=tuple(table.headers[i] for i in keep),
        rows=tuple(tuple(row[i] for i in keep) for row in table.rows),
        tones=table.tones,
        toned=shift(table.toned),
        notes=shift(table.notes),
        right=frozenset(i if i < column else i - 1 for i in table.right if i != column),
    )


def _boxed_table(fitted: Fitted) -> list[RenderableType]:
    table, widths = fitted.table, fitted.widths
    view = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, (header, width) in enumerate(zip(table.headers, widths, strict=True)):
        view.add_column(header, width=width, no_wrap=True, justify="right" if i in table.right else "left")
    tones = table.tones or ("",) * len(table.rows)
    for row, tone in zip(table.rows, tones, strict=True):
        cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = wrap_name(row[0], widths[0])
        styles = [_COLOURS.get(tone, "") if i == table.toned else "" for i in range(len(cells))]
        view.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    total = sum(widths) + _GAP * (len(widths) - 1)
    below = [Text(_wrap(text, total, indent=text.index(" ") + 1)) for text in fitted.below]
    if fitted.dropped:
        below.append(Text(_wrap(f"not shown: {', '.join(fitted.dropped)} (--wide shows all)", total), style="dim"))
    return [view, *below]


def wrap_name(name: str, width: int) -> str:
    """Break a name after a dot where that fits, else anywhere; nothing is lost."""
    lines = [""]
    *heads, last = split_pattern(name)
    for piece in (*(head + "." for head in heads), last):
        if len(lines[-1]) + len(piece) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(lines)


def _wrap(text: str, width: int, indent: int = 0) -> str:
    if len(text) <= width:
        return text
    lead = text[: len(text) - len(text.lstrip())]
    # The label's gap is kept: only the text after it is wrapped.
    head = lead + text[len(lead) : indent]
    body = textwrap.wrap(text[len(head) :], max(width - indent, 8), break_on_hyphens=False) or [""]
    return head + ("\n" + " " * indent).join(body)
