"""Fold names that differ only in numbers: `layers.0.fc`, `layers.1.fc` -> `layers.{0..1}.fc`.

    component   a piece of a name between dots; folded if it is a plain number
    pattern     a name whose numbers may be sets: `{0..31}`, `{0,2,5}`, `{0..3,7}`
    mark        how a text refers to its own name's numbers while names are compared

A text that mentions its own path (`layers.3.mlp does not close the cut`) folds as well: the path
becomes a mark, and reads `layers.{0..31}.mlp ...` in the fold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, TypeVar

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
    """Positions of the names, layer by layer: numbers counted up, and as they come within a layer.

    The names must come as a fold lists them: the parts of each layer in order.
    """
    return _by_layer([(position, name.split(".")) for position, name in enumerate(names)])


def _by_layer(entries: list[tuple[int, list[str]]]) -> list[int]:
    stacks: dict[tuple[str, ...], dict[int, list[tuple[int, list[str]]]]] = {}
    for position, parts in entries:
        at = next((i for i, part in enumerate(parts) if _is_number(part)), None)
        path, number = (tuple(parts[:at]), int(parts[at])) if at is not None else ((*parts, f"\0{position}"), 0)
        rest = parts[at + 1 :] if at is not None else []
        stacks.setdefault(path, {}).setdefault(number, []).append((position, rest))
    order: list[int] = []
    for layers in stacks.values():
        for number in sorted(layers):
            inside = layers[number]
            order += _by_layer(inside) if any(rest for _, rest in inside) else [position for position, _ in inside]
    return order


def in_order(folds: Sequence[Fold], names: Sequence[str]) -> list[Fold]:
    """The folds, each before those that follow it in any layer (layers of two kinds have parts of their own)."""
    of = {i: k for k, fold in enumerate(folds) for i in fold.members}
    after: dict[int, set[int]] = {k: set() for k in range(len(folds))}
    for i, (name, following) in enumerate(pairwise(names)):
        if of[i] != of[i + 1] and _same_layer(name, following):
            after[of[i]].add(of[i + 1])
    placed: list[int] = []
    waiting = list(after)
    while waiting:
        free = (k for k in waiting if not any(k in after[other] for other in waiting if other != k))
        placed.append(next(free, waiting[0]))  # a circle: the order cannot be kept, and whoever folds will see
        waiting.remove(placed[-1])
    return [folds[k] for k in placed]


def _same_layer(a: str, b: str) -> bool:
    pairs = zip(a.split("."), b.split("."), strict=False)
    return all(x == y for x, y in pairs if _is_number(x) and _is_number(y))


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

_NAMES: dict[type, str] = {Row: "name", Collective: "module", Finding: "where"}
_TEXTS: dict[type, tuple[str, ...]] = {Row: ("reason", "tied_to"), Collective: (), Finding: ("message",)}
Item = TypeVar("Item", Row, Collective, Finding)


def as_template(item: Item) -> tuple[str, Item]:
    """An item's name, and the item without it: no name, and marks in its texts."""
    kind = type(item)
    name = getattr(item, _NAMES[kind])
    changes: dict[str, Any] = {_NAMES[kind]: ""}
    for field in _TEXTS[kind]:
        text = getattr(item, field)
        changes[field] = text and mark(text, name)
    return name, replace(item, **changes)


def named(template: Item, name: str) -> Item:
    """The item that a template is of this name, or pattern of names."""
    kind = type(template)
    changes: dict[str, Any] = {_NAMES[kind]: name}
    for field in _TEXTS[kind]:
        text = getattr(template, field)
        changes[field] = text and unmark(text, name)
    return replace(template, **changes)


def fold_rows(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Rows that agree in everything but numbers in their names, with how many each stands for."""
    return _fold(rows)


def fold_collectives(calls: Sequence[Collective]) -> list[tuple[Collective, int]]:
    """Equal calls of like modules, with how many each stands for."""
    seen = Counter(calls)
    unique = list(seen)
    folds = fold_names([(call.module, (call.kind, call.when, call.bytes, seen[call])) for call in unique])
    return [
        (replace(unique[fold.members[0]], module=fold.pattern), sum(seen[unique[i]] for i in fold.members))
        for fold in folds
    ]


def fold_findings(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Findings of like modules, errors and warnings first, with how many each stands for."""
    rank = {"error": 0, "warning": 1}
    return sorted(_fold(findings), key=lambda pair: rank.get(pair[0].level, 2))


def _fold(items: Sequence[Item]) -> list[tuple[Item, int]]:
    templates = [as_template(item) for item in items]
    return [(named(templates[fold.members[0]][1], fold.pattern), len(fold.members)) for fold in fold_names(templates)]
