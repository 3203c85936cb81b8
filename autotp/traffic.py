"""The communication of one step, from the programs: who calls what, forward and backward, and how many bytes."""

from __future__ import annotations

import math
from dataclasses import replace

from autotp.call_edits import ResultEdit, SharedEdit
from autotp.hoisting import ModuleProgram
from autotp.ownership.rules_shared_classes import SharedClasses
from autotp.plan_types import Collective
from autotp.record import Call, Trace
from autotp.search import Analysis
from autotp.trees import Ref

Placed = list[tuple[int, Collective]]  # each with the call that it belongs to


def collectives_of(analysis: Analysis, programs: dict[str, ModuleProgram]) -> tuple[Collective, ...]:
    """All collectives of one forward and backward on the sample, forward ones first, each in the order of the run."""
    trace = analysis.trace
    forward: Placed = []
    backward: Placed = []
    entered: set[int] = set()
    used: set[tuple[int, int]] = set()
    edge = {
        (m.index, tid): m.path
        for m in trace.modules
        for path, tid in m.inputs.items()
        if m.path in programs and path in programs[m.path].inputs
    }
    for c in trace.calls:
        where = trace.module_path(c) if c.module >= 0 else ""
        edit = analysis.edits[c.index]
        for i, e in edit.operands.items():
            tid = c.leaves[i].tid
            if e.sum:
                forward.append((c.index, _one(analysis, where, "all_reduce", "forward", tid)))
            if e.gather and _first_use(trace, c, tid, used):
                forward.append((c.index, _one(analysis, where, "all_gather", "forward", tid)))
            if e.enter and e.slice and e.stream is not None:
                backward.append((c.index, _one(analysis, where, "all_gather", "backward", tid)))
            elif e.enter and e.unless is None and (trace.tensors[tid].parameter or tid not in entered):
                entered.add(tid)
                at, path = _place(trace, edge, c.module, tid) or (c.index, where)
                backward.append((at, _one(analysis, path, "all_reduce", "backward", tid)))
        for when, kind, size in _statistics(analysis, c, edit.shared) if edit.shared is not None else ():
            placed = forward if when == "forward" else backward
            placed.append((c.index, Collective(module=where, kind=kind, when=when, bytes=size)))
        for i, r in edit.results.items():
            if isinstance(c.outs[i], Ref):
                tid = c.outs[i].tid
                kinds = _of_result(r, trace.tensors[tid].grad)
                forward += [(c.index, _one(analysis, where, kind, "forward", tid)) for kind in kinds[0]]
                backward += [(c.index, _one(analysis, where, kind, "backward", tid)) for kind in kinds[1]]
    for tid in analysis.returned_cut.values():
        forward.append((len(trace.calls), _one(analysis, "", "all_gather", "forward", tid)))
    return (*_with_skipped(trace, forward), *_with_skipped(trace, backward))


def _first_use(trace: Trace, call: Call, tid: int, used: set[tuple[int, int]]) -> bool:
    """Whether a gather is made here: a module puts a parameter of its own together once for all of its calls."""
    homes = {n.rpartition(".")[0] for n, t in trace.leaves.items() if t == tid}
    if call.module < 0 or trace.module_path(call) not in homes:
        return True
    first = (call.module, tid) not in used
    used.add((call.module, tid))
    return first


def _of_result(edit: ResultEdit, grad: bool) -> tuple[list[str], list[str]]:
    """The collectives of a result, forward and backward."""
    if edit.scatter:
        return ["reduce_scatter"] * edit.leave, ["all_gather"] * grad
    return ["all_reduce" if edit.leave else "all_gather"], ["reduce_scatter"] * (edit.summed and grad)


def _statistics(analysis: Analysis, call: Call, edit: SharedEdit) -> list[tuple[str, str, int]]:
    """When and how statistics are exchanged where a call is replaced, and the bytes of all of them."""
    what, info = edit.what, analysis.trace.tensors[analysis.own.shared[call.index][1]]
    width, ranks = max(info.dtype.itemsize, 4), len(edit.parts)
    if isinstance(what, SharedClasses):
        rows = math.prod(info.shape) // info.shape[what.cut]
        sent, back = what.sent[0] * ranks, what.sent[1] if info.grad else 0
        found = [("forward", "all_gather", sent * rows * width), ("backward", "all_reduce", back * rows * width)]
        return [x for x in found if x[2]]
    rows = info.shape[0] * what.over if what.kind == "group" else math.prod(info.shape[: -what.over])
    both = ("all_reduce", rows * width) if what.kind == "rms" else ("all_gather", 2 * ranks * rows * width)
    return [("forward", *both), ("backward", "all_reduce", both[1])]


def _with_skipped(trace: Trace, found: Placed) -> list[Collective]:
    """In the order of the run, with those of skipped blocks, which communicate like the block that ran for them."""
    placed = [((at, 1, 0), c) for at, c in found]
    for m in trace.modules:
        if m.same_as >= 0:
            like = trace.modules[m.same_as]
            inside = [c for at, c in found if like.start <= at < like.stop]
            inside = [c for c in inside if f"{c.module}.".startswith(f"{like.path}.")]
            placed += [((m.start, 0, m.index), replace(c, module=m.path + c.module[len(like.path) :])) for c in inside]
    return [c for _, c in sorted(placed, key=lambda pair: pair[0])]


def _place(trace: Trace, edge: dict[tuple[int, int], str], module: int, tid: int) -> tuple[int, str] | None:
    """The module around a call at whose edge a tensor is entered, and the first call in it."""
    while module >= 0:
        if (module, tid) in edge:
            return trace.modules[module].start, str(edge[module, tid])
        module = trace.modules[module].parent
    return None


def _one(analysis: Analysis, where: str, kind: str, when: str, tid: int) -> Collective:
    info = analysis.trace.tensors[tid]
    return Collective(module=where, kind=kind, when=when, bytes=math.prod(info.shape) * info.dtype.itemsize)
