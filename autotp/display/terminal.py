"""Printing: answers to stdout, notes and progress to stderr.

A terminal gets boxes that fit its width, and colour unless NO_COLOR is set; anything else gets
plain text.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from autotp.display.sections import Section
from autotp.display.text import boxed, plain

_DEFAULT_WIDTH, _DEFAULT_HEIGHT, _ENDLESS = 80, 24, 10_000


def terminal_width() -> int:
    """Columns of the terminal, or what COLUMNS says."""
    return shutil.get_terminal_size((_DEFAULT_WIDTH, _DEFAULT_HEIGHT)).columns


def show(sections: Sequence[Section], *, stream: TextIO | None = None, wide: bool = False) -> None:
    """Print sections as the stream can take them; `wide` shows every column, however long the lines."""
    stream = stream or sys.stdout
    if not stream.isatty():
        stream.write(plain(sections) + "\n")
        return
    width = _ENDLESS if wide else terminal_width()
    # Everything is laid out for the width already: rich must not shrink what cannot get narrower.
    console = Console(
        file=stream,
        width=_ENDLESS,
        height=_DEFAULT_HEIGHT,
        color_system="auto" if _may_colour(stream) else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(boxed(sections, width), soft_wrap=True)


def _may_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Notes:
    """Remarks beside the answer, on stderr: a word first, colour only on a terminal."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet

    def note(self, text: str) -> None:
        """Something to know; left out when quiet."""
        if not self._quiet:
            self._write("note", "", text)

    def warning(self, text: str) -> None:
        """Something to look at."""
        self._write("warning", "33", text)

    def error(self, text: str) -> None:
        """Why there is no answer."""
        self._write("error", "1;31", text)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A spinner with the time taken so far, on a terminal only."""
        if self._quiet or not self._stream.isatty() or os.environ.get("TERM") == "dumb":
            yield
            return
        with Console(file=self._stream, highlight=False).status(what):
            yield

    def _write(self, word: str, colour: str, text: str) -> None:
        label = f"\033[{colour}m{word}\033[0m" if colour and _may_colour(self._stream) else word
        self._stream.write(f"autotp: {label}: {text}\n")
        self._stream.flush()
