"""Find out by running it how an operation without a rule may be cut.

For every dim of the first result: is there a dim in some of the operands, such that the operation on some of its
indices gives the result at these indices, forward and backward? That is claimed of all combinations of equally long
dims, and tried (:mod:`autotp.ownership.trials`). What is not shown is as for any operation without a rule: whole.

Trials show what an operation does on what they draw, not what it is. Operations of torch and its own libraries are
functions without hidden thresholds and are trusted that far; those of others only if the user asks for it. The former
run in a process apart, as some read memory where the values they are given tell them to. A custom autograd function is
trusted as far as it consists of operations of torch, forward and backward, and goes by no values that it computes
(:mod:`autotp.ownership.watched`).
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autotp import torch_ops
from autotp.functions import FunctionOp
from autotp.ownership.apart import asked
from autotp.ownership.claims import Slot, Trial, slot
from autotp.ownership.engine import Ownership
from autotp.ownership.registry import no_rule, rule_of
from autotp.ownership.rules_dims import Operand, by_dims
from autotp.ownership.trials import mistake, sizes_of
from autotp.ownership.watched import TRUSTED
from autotp.record import Op
from autotp.trees import Ref, flatten

MAX_NUMEL = 1 << 16
MAX_CLAIMS = 256


@dataclass(frozen=True)
class Shown:
    """One dim along which an operation may be cut: its place in every operand, and in every result."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True)
class Found:
    """All such dims, and what trials speak against for another one."""

    dims: tuple[Shown, ...] = ()
    against: str = ""


def may_be_tried(func: Any) -> bool:
    """Whether an operation is of a library that is trusted, makes new tensors, and draws no numbers."""
    return isinstance(func, FunctionOp) or (func.namespace in TRUSTED and torch_ops.is_functional(func))


def by_trial(own: Ownership, op: Op) -> None:
    """Carry owners along the dims that trials have shown; else everything whole."""
    leaves = flatten((op.args, op.kwargs))[0]
    refs = [x.tid for x in leaves if isinstance(x, Ref)]
    result = searched(own, op)
    found, against = result.dims, f": {result.against}" if isinstance(op.func, FunctionOp) and result.against else ""
    if not found:
        return no_rule(own, op, against)
    out = own.shape(op.outs[0])
    frame = tuple(out[s.results[0] or 0] for s in found)
    operands = []
    for k, tid in enumerate(refs):
        place = {s.operands[k]: i for i, s in enumerate(found)}
        operands.append(Operand(tid, tuple(place.get(d) for d in range(len(own.shape(tid))))))
    results = []
    for j, t in enumerate(op.outs):
        place = {s.results[j]: i for i, s in enumerate(found)}
        there = any(s.results[j] is not None for s in found)
        results.append(tuple(place.get(d) for d in range(len(own.shape(t)))) if there else None)
    by_dims(own, op, operands, range(len(frame)), results, frame, against)
    owners = own.owners(op.outs[0])
    if owners is not None:
        own.tried.append((str(op.func.overloadpacket), own.nodes.distinct(owners)))
    return None


_FOUND: dict[Any, Found] = {}


def shown(own: Ownership, op: Op) -> tuple[Shown, ...]:
    """What trials show of an operation on tensors of these shapes."""
    return searched(own, op).dims


def searched(own: Ownership, op: Op) -> Found:
    """The same with what speaks against other dims; tried once in a process."""
    base = _claim(own, op)
    if base is None:
        return Found()
    if base.key not in _FOUND:
        outs = [own.shape(t) for t in op.outs]
        _FOUND[base.key] = _elsewhere(base, outs) if op.func.namespace in TRUSTED else _search(base, outs)
    return _FOUND[base.key]


def _elsewhere(base: Trial, outs: list[tuple[int, ...]]) -> Found:
    """The search in a process apart: nothing is shown if it ends that process."""
    try:
        payload = base.func.name(), pickle.dumps((replace(base, func=None), outs))
    except (pickle.PicklingError, TypeError, AttributeError):
        return Found()
    return asked(base.func.namespace, f"{__name__}:search_for", payload) or Found()


def search_for(payload: tuple[str, bytes]) -> Found:
    """What :func:`searched` asks for there: an operation by its full name, and the claim about it."""
    name, rest = payload
    base, outs = pickle.loads(rest)
    return _search(replace(base, func=torch_ops.operation(name)), outs)


def _claim(own: Ownership, op: Op) -> Trial | None:
    """An empty claim about this call, or None if it is not one to be tried."""
    if not op.outs or any(t < 0 for t in op.outs):
        return None
    leaves, spec = flatten((op.args, op.kwargs))
    slots = tuple(slot(own.trace, i, x.tid) for i, x in enumerate(leaves) if isinstance(x, Ref))
    if any(0 in s.shape for s in slots):
        return None
    plain = tuple(None if isinstance(x, Ref) else x for x in leaves)
    nowhere = (None,) * len(slots)
    asked_for = rule_of(op.func) is by_trial
    return Trial(op.func, plain, spec, slots, nowhere, (None,) * len(op.outs), thorough=True, asked=asked_for)


def _search(base: Trial, outs: list[tuple[int, ...]]) -> Found:
    small = _smaller(base)
    sizes = sizes_of(small) if small is not None else None
    if small is None or sizes is None or [len(s) for s in sizes] != [len(s) for s in outs]:
        return Found(against="it cannot be run on small tensors on the CPU")
    found: list[Shown] = []
    taken: set[tuple[int, int]] = set()
    tries, against = 0, ""
    for r, n in enumerate(outs[0]):
        for claim in _claims(base, outs, r, n, taken) if n > 1 else ():
            tries += 1
            if tries > MAX_CLAIMS:
                return Found(tuple(found), against)
            trial = replace(small, dims=claim.operands, results=claim.results, full=n)
            why = mistake(trial) if _fits(trial, sizes) else "another size on small tensors"
            if not why:
                taken |= {(k, d) for k, d in enumerate(claim.operands) if d is not None}
                found.append(claim)
                break
        else:
            against = f"along dim {r}, {why}" if n > 1 and why else against
    return Found(tuple(found), against)


def _claims(base: Trial, outs: list[tuple[int, ...]], r: int, n: int, taken: set[tuple[int, int]]) -> Iterator[Shown]:
    """Ways in which dim ``r`` of the first result, of size ``n``, could be a dim of operands, few operands first."""
    options = [
        [None, *(d for d, m in enumerate(s.shape) if m == n and (k, d) not in taken)] for k, s in enumerate(base.slots)
    ]
    others = [[None, *(d for d, m in enumerate(shape) if m == n)] for shape in outs[1:]]
    picks = [p for p in itertools.product(*options) if any(d is not None for d in p)]
    for operands in sorted(picks, key=lambda p: sum(d is not None for d in p)):
        for results in itertools.product(*others):
            yield Shown(operands, (r, *results))


def _fits(trial: Trial, sizes: list[tuple[int, ...]]) -> bool:
    """Whether the dims that are claimed to be one are equally long on the small tensors too."""
    ns = {s.shape[d] for s, d in zip(trial.slots, trial.dims, strict=True) if d is not None}
    ns |= {shape[d] for shape, d in zip(sizes, trial.results, strict=True) if d is not None}
    return len(ns) == 1 and ns != {1}


def _smaller(base: Trial) -> Trial | None:
    """The claim on tensors small enough to run; None if the operation does not take smaller ones."""
    if sum(math.prod(s.shape) for s in base.slots) <= MAX_NUMEL:
        return base
    large = sorted({n for s in base.slots for n in s.shape if n > 12})
    common = math.gcd(*large)
    for unit in (8, 6, 4):
        if unit >= common:
            continue
        to = {n: n // common * unit for n in large}
        slots = tuple(_resized(s, tuple(to.get(n, n) for n in s.shape)) for s in base.slots)
        trial = replace(base, slots=slots)
        if sum(math.prod(s.shape) for s in slots) <= MAX_NUMEL and sizes_of(trial) is not None:
            return trial
    return None


def _resized(s: Slot, shape: tuple[int, ...]) -> Slot:
    return s if shape == s.shape else replace(s, shape=shape, content=None)


__all__ = ["TRUSTED", "by_trial", "may_be_tried", "shown"]
