"""How an operation treats the dims of its tensors, in words: ``"b h s d, h d -> b h s d; cut b h"``.

    declaration   operands "->" results { ";" clause }
    operands      groups of names, one per tensor argument in the order of the schema, separated by commas
    results       the same for the tensors that it returns
    clause        "cut" names: every index of these dims is on its own
                  "sum" names: the result is a sum over the indices of these dims

A dim has a name; ``...`` stands for any number of leading dims. One name is one size, except that an operand may have
size 1 where another has more. A dim that no clause names must be whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotp.errors import RuleError
from autotp.lookup import nearest

Names = tuple[str, ...]
ELLIPSIS = "..."


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A parsed declaration; ``...`` is a name like others until the number of dims is known."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    cut: frozenset[str]
    sums: frozenset[str]
    text: str


def parse(text: str, where: str) -> Declaration:
    """Read a declaration.

    Raises:
        RuleError: text that is none; names that repeat, are unknown to a clause, or stand in the wrong place.
    """
    shapes, *clauses = [part.strip() for part in text.split(";")]
    if shapes.count("->") != 1:
        raise _bad(where, text, "it must have one '->' between operands and results")
    operands, results = (tuple(tuple(g.split()) for g in side.split(",")) for side in shapes.split("->"))
    named: dict[str, frozenset[str]] = {"cut": frozenset(), "sum": frozenset()}
    for clause in clauses:
        word, *names = clause.split() or [""]
        if word not in named or not names:
            raise _bad(where, text, f"{clause!r} is no clause: write 'cut NAMES' or 'sum NAMES'")
        named[word] |= frozenset(names)
    found = Declaration(operands=operands, results=results, cut=named["cut"], sums=named["sum"], text=text)
    _check(found, where)
    return found


def _check(d: Declaration, where: str) -> None:
    known = sorted({n for g in (*d.operands, *d.results) for n in g})
    for group in (*d.operands, *d.results):
        bad = [n for n in group if n != ELLIPSIS and not n.isidentifier()]
        if bad:
            raise _bad(where, d.text, f"{bad[0]!r} is no name of a dim")
        if len(set(group)) < len(group):
            raise _bad(where, d.text, f"a name stands twice in {' '.join(group)!r}")
        if ELLIPSIS in group[1:]:
            raise _bad(where, d.text, "'...' stands for leading dims: it must come first")
    for name in sorted(d.cut | d.sums):
        if name not in known:
            hint = ", ".join(nearest(name, known) or known)
            raise _bad(where, d.text, f"no dim is named {name!r}; did you mean {hint}")
    if not d.cut | d.sums:
        raise _bad(where, d.text, "no clause says what may be cut")
    for name in sorted(d.cut & d.sums):
        raise _bad(where, d.text, f"{name!r} cannot be both cut and summed over")
    for name in sorted(d.cut):
        if not all(name in g for g in d.results) or not any(name in g for g in d.operands):
            raise _bad(where, d.text, f"{name!r} is to be cut: an operand and every result must have it")
    for name in sorted(d.sums):
        if any(name in g for g in d.results) or len(d.results) > 1:
            raise _bad(where, d.text, f"{name!r} is summed over: the result, of which there is one, must not have it")


def _bad(where: str, text: str, why: str) -> RuleError:
    return RuleError(f'{where}: the declaration "{text}" cannot be read: {why}. See docs/teaching-operations.md.')


def spelled(names: Names, ndim: int, where: str, text: str) -> Names:
    """Names for every dim of a tensor: ``...`` written out, counted from the right as broadcasting does."""
    if ELLIPSIS not in names:
        if len(names) != ndim:
            raise RuleError(f'{where}: "{text}" names {len(names)} dims in {" ".join(names)!r}, the tensor has {ndim}')
        return names
    rest = names[1:]
    if ndim < len(rest):
        raise RuleError(f'{where}: "{text}" names {len(rest)} dims in {" ".join(rest)!r}, the tensor has {ndim}')
    leading = ndim - len(rest)
    return (*(f"...{leading - i}" for i in range(leading)), *rest)


def covers(names: frozenset[str], all_names: Sequence[str]) -> set[str]:
    """Which spelled names a clause means: ``...`` all leading ones."""
    return {n for n in all_names if n in names or (n.startswith(ELLIPSIS) and ELLIPSIS in names)}
