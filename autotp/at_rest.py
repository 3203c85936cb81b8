"""The last choice for a weight matrix that nothing lets be cut in use: it is cut at rest.

Every rank keeps a part of it (and of its gradient and optimizer state). Where a module reads it, the parts are put
together for that run of the module; all ranks then compute the same with it and each keeps its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotp.call_edits import OperandEdit
from autotp.errors import RuleError
from autotp.ownership.dealing import Sets, deal
from autotp.record import Call, Trace
from autotp.search import Analysis
from autotp.trees import Ref

Use = tuple[Call, int]


def cut_at_rest(analysis: Analysis, wanted: Mapping[str, int | None]) -> None:
    """Add to an analysis the parts and the gathers of all matrices that it leaves whole.

    Args:
        wanted: parameters for which the user asked for this, with the dim to cut, or None for any.

    Raises:
        RuleError: a wanted parameter cannot be kept that way.
    """
    trace = analysis.trace
    reader = _Reader(trace)
    asked = {trace.leaves[name]: (name, dim) for name, dim in wanted.items()}
    for tid in dict.fromkeys(trace.leaves.values()):
        name, dim = asked.get(tid, ("", None))
        if not trace.tensors[tid].parameter or analysis.dealing.sets(tid) or (tid in analysis.chosen and not name):
            continue
        why = reader.obstacle(tid, analysis)
        sets = _parts(trace.tensors[tid].shape, analysis.dealing.tp, dim) if not why else {}
        if sets:
            _keep(analysis, reader, tid, sets)
        elif name:
            size = list(trace.tensors[tid].shape)
            raise RuleError(
                f"{name}: gathered_at_use cannot be followed: "
                f"{why or f'{size} has no such dim to be dealt to {analysis.dealing.tp} ranks'}. Use another style."
            )


def keep_at_rest(analysis: Analysis, parts: Mapping[int, Sets]) -> set[int]:
    """The same for parameters that are in parts already; those that cannot be put together for their uses.

    Code outside of modules may read them: what runs it shows it whole ones.
    """
    reader = _Reader(analysis.trace, outside=False)
    refused = {tid for tid in parts if reader.uses.get(tid) and reader.obstacle(tid, analysis)}
    for tid, sets in parts.items():
        if tid not in refused:
            _keep(analysis, reader, tid, sets)
    return refused


def _keep(analysis: Analysis, reader: _Reader, tid: int, sets: Sets) -> None:
    analysis.dealing.store(tid, sets)
    for call, i in reader.uses.get(tid, []):
        edit = analysis.edits[call.index]
        edit.operands[i] = replace(edit.operands.get(i, OperandEdit()), gather=tuple(sets.items()))


def _parts(shape: tuple[int, ...], tp: int, dim: int | None) -> Sets:
    """Equal parts of the first dim that allows them; else uneven ones of the longest."""
    dims = [d for d, n in enumerate(shape) if n >= tp and dim in (None, d)]
    if not dims:
        return {}
    even = [d for d in dims if shape[d] % tp == 0]
    best = even[0] if even else max(dims, key=lambda d: shape[d])
    ranks = deal(shape[best], tp)
    ends = [ranks.index(r) for r in range(tp)] + [shape[best]]
    return {best: tuple(range(ends[r], ends[r + 1]) for r in range(tp))}


class _Reader:
    """Who reads which parameter, and what stands against handing it over only then."""

    def __init__(self, trace: Trace, outside: bool = True) -> None:
        self.trace = trace
        self.uses: dict[int, list[Use]] = {}
        for c in (c for c in trace.calls if outside or c.module >= 0):
            for i, x in enumerate(c.leaves):
                if isinstance(x, Ref) and trace.tensors[x.tid].parameter:
                    self.uses.setdefault(x.tid, []).append((c, i))
        self.written = {trace.tensors[t].storage for op in trace.ops for t in op.writes}
        self.passed = set(trace.outputs)
        self.ran = {m.path for m in trace.modules}
        for m in trace.modules:
            self.passed |= {*m.inputs.values(), *m.outputs.values()}
        self.homes: dict[int, set[str]] = {}
        for name, tid in trace.leaves.items():
            self.homes.setdefault(tid, set()).add(name.rpartition(".")[0])

    def obstacle(self, tid: int, analysis: Analysis) -> str:
        """Why a parameter must stay whole; empty if nothing says so."""
        info = self.trace.tensors[tid]
        uses = self.uses.get(tid, [])
        if sum(n > 1 for n in info.shape) < 2:
            return "it is no matrix"
        if not uses:
            return "its module ran and did not read it" if self.homes[tid] & self.ran else ""
        if any(c.module < 0 for c, _ in uses):
            return "it is read outside of modules"
        if info.storage in self.written:
            return "it is written into"
        if tid in self.passed:
            return "modules hand it on"
        if any(_sparse(self.trace, c, tid) for c, _ in uses):
            return "its gradient is sparse"
        return self._by_place(tid, uses, analysis)

    def _by_place(self, tid: int, uses: list[Use], analysis: Analysis) -> str:
        """Read by its own module, alike each time, it is handed over once for a run; else each reader gets it."""
        own = [self.trace.module_path(c) in self.homes[tid] for c, _ in uses]
        if all(own):
            by_path: dict[str, set[OperandEdit]] = {}
            for c, i in uses:
                edit = analysis.edits[c.index].operands.get(i, OperandEdit())
                by_path.setdefault(self.trace.module_path(c), set()).add(edit)
            return "it is read in two ways" if any(len(edits) > 1 for edits in by_path.values()) else ""
        if any(own) or any(c.fixed or self._inside_home(c, tid) for c, _ in uses):
            return "it is read from several places"
        return ""

    def _inside_home(self, call: Call, tid: int) -> bool:
        """Whether the module that holds it is running while another reads it."""
        at = call.module
        while at >= 0:
            if self.trace.modules[at].path in self.homes[tid]:
                return True
            at = self.trace.modules[at].parent
        return False


def _sparse(trace: Trace, call: Call, tid: int) -> bool:
    """Whether a look-up gives this weight a sparse gradient."""
    for op in trace.ops[call.start : call.stop]:
        names = [a.name for a in op.func._schema.arguments]
        at = names.index("sparse") if "sparse" in names else len(op.args)
        if tid in op.ins and at < len(op.args) and op.args[at]:
            return True
    return False
