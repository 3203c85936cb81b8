"""The communication of one step, from the programs: who calls what, forward and backward, and how many bytes."""

from __future__ import annotations

import math
from dataclasses import replace

from autotp.analysis import Analysis
from autotp.hoisting import ModuleProgram
from autotp.plan_types import Collective
from autotp.program import NormEdit, ResultEdit
from autotp.record import Call, Trace
from autotp.trees import Ref


def collectives_of(analysis: Analysis, programs: dict[str, ModuleProgram]) -> tuple[Collective, ...]:
    """All collectives of one forward and backward on the sample, forward ones first, each in the order of the run."""
    trace = analysis.trace
    forward: list[Collective] = []
    backward: list[Collective] = []
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
            if e.gather and _first_use(trace, c, tid, used):
                forward.append(_one(analysis, where, "all_gather", "forward", tid))
            if e.enter and e.slice and e.stream is not None:
                backward.append(_one(analysis, where, "all_gather", "backward", tid))
            elif e.enter and e.unless is None and (trace.tensors[tid].parameter or tid not in entered):
                entered.add(tid)
                backward.append(
                    _one(analysis, _place(trace, edge, c.module, tid) or where, "all_reduce", "backward", tid)
                )
        if edit.norm is not None:
            both = _statistics(analysis, c, edit.norm)
            forward.append(Collective(module=where, kind=both[0], when="forward", bytes=both[1]))
            backward.append(Collective(module=where, kind="all_reduce", when="backward", bytes=both[1]))
        for i, r in edit.results.items():
            if isinstance(c.outs[i], Ref):
                tid = c.outs[i].tid
                kinds = _of_result(r, trace.tensors[tid].grad)
                forward += [_one(analysis, where, kind, "forward", tid) for kind in kinds[0]]
                backward += [_one(analysis, where, kind, "backward", tid) for kind in kinds[1]]
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


def _statistics(analysis: Analysis, call: Call, edit: NormEdit) -> tuple[str, int]:
    """How a norm's statistics are exchanged, and the bytes of all of them."""
    info = analysis.trace.tensors[next(x.tid for x in call.leaves if isinstance(x, Ref))]
    rows = info.shape[0] * edit.norm.over if edit.norm.kind == "group" else math.prod(info.shape[: -edit.norm.over])
    size = rows * max(info.dtype.itemsize, 4)
    return ("all_reduce", size) if edit.norm.kind == "rms" else ("all_gather", 2 * len(edit.parts) * size)


def _with_skipped(trace: Trace, found: list[Collective]) -> list[Collective]:
    """Skipped blocks communicate like the block that ran for them, right after it."""
    after: dict[str, list[str]] = {}
    for path, like in trace.skipped:
        after.setdefault(like, []).append(path)
    out: list[Collective] = []
    pending: tuple[str, list[Collective]] = ("", [])
    for c in [*found, None]:
        like = next((p for p in after if c is not None and (c.module == p or c.module.startswith(p + "."))), "")
        if like != pending[0]:
            for path in after.get(pending[0], []):
                out += [replace(x, module=path + x.module[len(pending[0]) :]) for x in pending[1]]
            pending = (like, [])
        if c is not None:
            out.append(c)
            pending[1].append(c)
    return out


def _place(trace: Trace, edge: dict[tuple[int, int], str], module: int, tid: int) -> str | None:
    while module >= 0:
        if (module, tid) in edge:
            return str(edge[module, tid])
        module = trace.modules[module].parent
    return None


def _one(analysis: Analysis, where: str, kind: str, when: str, tid: int) -> Collective:
    info = analysis.trace.tensors[tid]
    return Collective(module=where, kind=kind, when=when, bytes=math.prod(info.shape) * info.dtype.itemsize)
