"""Solve for the numbers in a call that count what is cut: ``view(B, T, 12, 64)`` -> ``view(B, T, 6, 64)``."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autotp import torch_ops
from autotp.call_edits import CallEdit, NumberEdit
from autotp.errors import AutotpError
from autotp.ownership.dealing import Dealing
from autotp.ownership.state import Count
from autotp.record import Call
from autotp.trees import Ref, rebuild

Numbers = dict[int, NumberEdit]


def edited(x: Any, edit: NumberEdit) -> Any:
    """A number changed by an edit; raises if it is not the number that was planned for."""
    if edit.ratio is not None:
        above, below = edit.ratio.numerator, edit.ratio.denominator
        if x * above % below:
            raise AutotpError(f"{x} is not divisible as planned (times {edit.ratio})")
        return x * above // below
    if x != edit.seen:
        raise AutotpError(f"the plan expects {edit.seen} here, got {x}")
    return edit.value


class Unsolvable(Exception):
    """A count that is not whole on a rank."""


@dataclass(frozen=True)
class Solver:
    """Proposes edits of the numbers of one call on one rank; whoever asks tries them."""

    dealing: Dealing
    edit: CallEdit
    rank: int

    def scale_counts(self, call: Call, leaves: list[Any], numbers: Numbers) -> list[int]:
        """A call that counts what is cut counts a rank's share of it; the places of these numbers."""
        places = []
        for count in self.dealing.own.scaled[call.index]:
            share = self._share(call, count)
            at = _place(call, count)
            if (at is None and share != 1) or (count.value * share).denominator != 1:
                raise Unsolvable(f"{call.name} works on {count.value} groups, which cannot be counted per rank")
            if at is not None:
                places.append(at)
                if leaves[at] != count.value * share:  # else it was read from a rank's part
                    numbers[at] = NumberEdit(ratio=share)
        return places

    def _share(self, call: Call, count: Count) -> Fraction:
        """The part that a rank has of what is counted."""
        refs = [(i, r.tid) for i, r in enumerate(call.leaves) if isinstance(r, Ref) and count.tid in (None, r.tid)]
        if not refs:
            raise Unsolvable(f"{call.name} counts something of a tensor that it was not given")
        i, x = refs[0]
        edit = self.edit.operands.get(i)
        gathered = dict(edit.gather if edit else ())
        held = {d: s for d, s in self.dealing.sets(x).items() if d not in gathered}
        sets = {**held, **dict(edit.slice if edit else ())}
        whole = self.dealing.own.trace.tensors[x].shape[count.dim]
        return Fraction(len(sets[count.dim][self.rank]), whole) if count.dim in sets else Fraction(1)

    def candidates(self, call: Call, leaves: list[Any], numbers: Numbers) -> Iterator[Numbers]:
        """Edits of the numbers, fewest changes first."""
        yield dict(numbers)
        if self.edit.stream is not None or self.dealing.counts_tokens:
            yield from self._of_tokens(call, leaves, numbers)
            return
        if numbers:
            return
        options: dict[int, list[NumberEdit]] = {}
        ratios = self._ratios(call)
        for i, (x, g) in enumerate(zip(leaves, call.leaves, strict=True)):
            if isinstance(x, bool) or not isinstance(x, int) or not isinstance(g, int):
                continue
            here = [NumberEdit(ratio=r) for r in ratios if x > 1 and (x * r).denominator == 1 and x * r != x]
            if x != g:
                here.insert(0, NumberEdit(seen=x, value=g))
            if here:
                options[i] = here
        yield from _combined(options)

    def _of_tokens(self, call: Call, leaves: list[Any], numbers: Numbers) -> Iterator[Numbers]:
        """Edits of numbers that count tokens; all other numbers were edited when tokens were whole."""
        parts = self.dealing.token_parts(self.edit.stream)
        options: dict[int, list[NumberEdit]] = {}
        for i, (x, g) in enumerate(zip(leaves, call.leaves, strict=True)):
            if i in numbers or isinstance(x, bool) or not isinstance(x, int) or not isinstance(g, int):
                continue
            for stream, per_rank in parts.items():
                mine, all_ = len(per_rank[self.rank]), sum(map(len, per_rank))
                down, up = Fraction(mine, all_), Fraction(all_, mine)
                if x != g and x * up == g:
                    options.setdefault(i, []).append(NumberEdit(ratio=up, stream=stream, up=True))
                elif x == g and x > 1 and (x * down).denominator == 1:
                    options.setdefault(i, []).append(NumberEdit(ratio=down, stream=stream))
        yield from ({**numbers, **found} for found in _combined(options))

    def _ratios(self, call: Call) -> list[Fraction]:
        found: dict[Fraction, None] = {}
        refs = [x.tid for x in (*call.outs, *call.leaves) if isinstance(x, Ref)]
        for tid in refs:
            for d, s in self.dealing.sets(tid).items():
                f = Fraction(len(s[self.rank]), self.dealing.own.trace.tensors[tid].shape[d])
                found[f] = found[1 / f] = None
        edit = self.edit
        for i, r in edit.results.items():
            for d, s in r.gather:
                found[Fraction(len(s[self.rank]), self.dealing.own.trace.tensors[call.outs[i].tid].shape[d])] = None
        own_cuts = self.dealing.own.cut
        if not found and own_cuts:
            found[Fraction(1, self.dealing.tp)] = found[Fraction(self.dealing.tp)] = None
        bounds = self._bounds(call) if call.name == "__getitem__" or "narrow" in call.name else {}
        return [*found, *bounds]

    def _bounds(self, call: Call) -> dict[Fraction, None]:
        """For slices of packed tensors: how many of the elements before a position are a rank's own."""
        out: dict[Fraction, None] = {}
        for ref in call.leaves:
            if isinstance(ref, Ref):
                for s in self.dealing.sets(ref.tid).values():
                    for g in call.leaves:
                        if isinstance(g, int) and not isinstance(g, bool) and g > 0:
                            out[Fraction(bisect_left(s[self.rank], g), g)] = None
        return {f: None for f in out if f}


def _place(call: Call, count: Count) -> int | None:
    """Where in a call's arguments a count is; None if it was left out, or something else was called."""
    if count.name is None:
        at = [i for i, g in enumerate(call.leaves) if type(g) is int and g == count.value]
        return at[-1] if at else None
    schema = torch_ops.schema_of(call.func)
    if schema is None:
        return None
    args, kwargs = rebuild(list(range(len(call.leaves))), call.spec)
    given = {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | kwargs
    place = given.get(count.name)
    return place if isinstance(place, int) else None


def _combined(options: dict[int, list[NumberEdit]]) -> Iterator[Numbers]:
    """Some of the options, fewest first."""
    for n in range(1, min(len(options), 4) + 1):
        for chosen in itertools.combinations(options, n):
            for picks in itertools.product(*(options[i] for i in chosen)):
                yield dict(zip(chosen, picks, strict=True))
