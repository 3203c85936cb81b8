"""Fold names that differ only in numbers: `layers.0.fc`, `layers.1.fc` -> `layers.{0..1}.fc`.

    component   a piece of a name between dots; folded if it is a plain number
    pattern     a name whose numbers may be sets: `{0..31}`, `{0,2,5}`, `{0..3,7}`
    mark        how a text refers to its own name's numbers while names are compared

A text that mentions its own path (`layers.3.mlp does not close the cut`) folds as well: the path
becomes a mark, and reads `layers.{0..31}.mlp ...` in the fold.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autotp.plan_types import Collective, Finding, Row

_SET = re.compile(r"\{\d+(\.\.\d+)?(,\d+(\.\.\d+)?)*\}")
_DOT = re.compile(r"\.(?![^{]*\})")
_MARK = re.compile(r"\x00(\d+)\x00")


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One pattern, and the positions (in the folded sequence) of the items it stands for, in name order."""

    pattern: str
    members: tuple[int, ...]


@dataclass
class _Entry:
    parts: tuple[str | tuple[int, ...], ...]
    key: Hashable
    members: list[int]


def fold_names(items: Sequence[tuple[str, Hashable]]) -> list[Fold]:
    """Fold `(name, key)` pairs: names fold together where the keys are equal. First come, first listed."""
    entries = [_Entry(_split(name), key, [i]) for i, (name, key) in enumerate(items)]
    depth = max((len(entry.parts) for entry in entries), default=0)
    for position in reversed(range(depth)):
        entries = _fold_at(entries, position)
    return [Fold(pattern=_join(entry.parts), members=tuple(entry.members)) for entry in entries]


def _fold_at(entries: list[_Entry], position: int) -> list[_Entry]:
    folded: dict[Hashable, _Entry] = {}
    for entry in entries:
        here = entry.parts[position] if position < len(entry.parts) else ""
        if isinstance(here, str):
            folded[id(entry)] = entry
            continue
        around = (entry.parts[:position], entry.parts[position + 1 :], entry.key)
        if around not in folded:
            folded[around] = _Entry(entry.parts, entry.key, list(entry.members))
            continue
        first = folded[around]
        seen = first.parts[position]
        assert isinstance(seen, tuple)
        if set(seen) & set(here):  # the same name twice: keep it apart, nothing may be hidden
            folded[id(entry)] = entry
            continue
        first.parts = (*first.parts[:position], seen + here, *first.parts[position + 1 :])
        first.members += entry.members
    return list(folded.values())


def _split(name: str) -> tuple[str | tuple[int, ...], ...]:
    return tuple((int(part),) if _is_number(part) else part for part in name.split("."))


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and str(int(part)) == part


def _join(parts: tuple[str | tuple[int, ...], ...]) -> str:
    return ".".join(part if isinstance(part, str) else _write_set(part) for part in parts)


def _write_set(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    short = 2 if len(runs) == 1 else 3
    texts = [f"{run[0]}..{run[-1]}" if len(run) >= short else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(texts) + "}"


def _read_set(text: str) -> list[int]:
    numbers: list[int] = []
    for piece in text.strip("{}").split(","):
        low, _, high = piece.partition("..")
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def split_pattern(pattern: str) -> list[str]:
    """The components of a pattern; the dots inside braces do not count."""
    return _DOT.split(pattern)


def unfold_name(pattern: str) -> list[str]:
    """All names a pattern stands for, the first set varying slowest."""
    choices = [[str(n) for n in _read_set(part)] if _SET.fullmatch(part) else [part] for part in split_pattern(pattern)]
    return [".".join(choice) for choice in product(*choices)]


def module_order(names: Iterable[str]) -> list[int]:
    """Positions of the names in the order of `named_parameters`: depth first, numbers counted up.

    The names must come as a fold lists them: each module's children in order.
    """
    root: dict[str, Any] = {}
    for position, name in enumerate(names):
        node = root
        for part in name.split("."):
            node = node.setdefault(part, {})
        node.setdefault("", {})[str(position)] = {}
    order: list[int] = []
    _walk(root, order)
    return order


def _walk(node: dict[str, Any], order: list[int]) -> None:
    order += map(int, node.pop("", {}))
    names = list(node)
    if all(_is_number(name) for name in names):
        names.sort(key=int)
    for name in names:
        _walk(node[name], order)


# Texts that mention the numbers of their own name


def _prefixes(parts: list[str]) -> list[tuple[int, str]]:
    """(component, path up to it) of every number or set of numbers, the longest path first."""
    numbered = [i for i, part in enumerate(parts) if _is_number(part) or _SET.fullmatch(part)]
    return [(i, ".".join(parts[: i + 1])) for i in reversed(numbered)]


def mark(text: str, name: str) -> str:
    """Replace the name's own numbered paths in a text by marks, so that the texts of two layers compare equal."""
    for component, path in _prefixes(split_pattern(name)):
        if path in text:
            text = re.sub(rf"(?<![\w.]){re.escape(path)}(?![\w{{}}])", f"\0{component}\0", text)
    return text


def unmark(text: str, name: str) -> str:
    """Put the paths of `name` (which may be a pattern) where the marks are."""
    parts = split_pattern(name)
    return _MARK.sub(lambda found: ".".join(parts[: int(found[1]) + 1]), text)


# What a plan is made of


def fold_rows(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Rows that agree in everything but numbers in their names, with how many each stands for."""
    blank = [
        replace(row, name="", reason=mark(row.reason, row.name), tied_to=row.tied_to and mark(row.tied_to, row.name))
        for row in rows
    ]
    folds = fold_names([(row.name, key) for row, key in zip(rows, blank, strict=True)])
    return [(_named(blank[fold.members[0]], fold.pattern), len(fold.members)) for fold in folds]


def _named(row: Row, name: str) -> Row:
    tied_to = row.tied_to and unmark(row.tied_to, name)
    return replace(row, name=name, reason=unmark(row.reason, name), tied_to=tied_to)


def unfold_row(row: Row) -> list[Row]:
    """The rows that a folded row stands for."""
    blank = replace(row, reason=mark(row.reason, row.name), tied_to=row.tied_to and mark(row.tied_to, row.name))
    return [_named(blank, name) for name in unfold_name(row.name)]


def fold_collectives(calls: Sequence[Collective]) -> list[tuple[Collective, int]]:
    """Equal calls of like modules, with how many each stands for."""
    seen: dict[Collective, int] = {}
    for call in calls:
        seen[call] = seen.get(call, 0) + 1
    unique = list(seen)
    folds = fold_names([(call.module, (call.kind, call.when, call.bytes, seen[call])) for call in unique])
    return [
        (replace(unique[fold.members[0]], module=fold.pattern), sum(seen[unique[i]] for i in fold.members))
        for fold in folds
    ]


def fold_findings(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Findings of like modules, errors and warnings first, with how many each stands for."""
    blank = [replace(f, where="", message=mark(f.message, f.where)) for f in findings]
    folds = fold_names([(f.where, key) for f, key in zip(findings, blank, strict=True)])
    folded = [
        (
            replace(
                blank[fold.members[0]],
                where=fold.pattern,
                message=unmark(blank[fold.members[0]].message, fold.pattern),
            ),
            len(fold.members),
        )
        for fold in folds
    ]
    rank = {"error": 0, "warning": 1}
    return sorted(folded, key=lambda pair: rank.get(pair[0].level, 2))
