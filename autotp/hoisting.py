"""From edits of calls to programs of modules: what can sit at a module's edge is moved there.

A module whose edits all sit at its edge runs its own code untouched. One tensor that several layers read is entered
once, at the edge of the lowest module that contains all its readers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autotp import torch_frames
from autotp.call_edits import CallEdit, Cuts, OperandEdit, ResultEdit
from autotp.errors import PlanError
from autotp.ownership.dealing import Sets
from autotp.record import Call, ModuleCall
from autotp.search import Analysis
from autotp.trees import Ref

Path = tuple[Any, ...]
Site = tuple[Any, ...]
Edge = tuple[str, Path]
_DIRECT = 2  # steps to an argument: by position or by name, and which


class Use(NamedTuple):
    """An operand of a call, and which of its module's calls it is, whichever run."""

    call: int
    leaf: int
    where: tuple[str, Site, int]


class Place(NamedTuple):
    """An input of one run of a module."""

    module: str
    path: Path
    run: int
    tid: int


@dataclass
class ModuleProgram:
    """What one module does differently on a rank. ``params`` holds every parameter (and cut buffer) of its own."""

    path: str
    params: dict[str, OperandEdit] = field(default_factory=dict)
    inputs: dict[Path, OperandEdit] = field(default_factory=dict)
    outputs: dict[Path, ResultEdit] = field(default_factory=dict)
    calls: dict[Site, list[CallEdit]] = field(default_factory=dict)
    funcs: dict[Site, Any] = field(default_factory=dict)  # what is called there
    runs: set[frozenset[Site]] = field(default_factory=set)  # the edited places of each run
    kinds: frozenset[Any] = frozenset()  # how it was called when it was planned
    holds_cut: bool = False  # its own code handles cut tensors
    touches_cut: bool = False  # and does not only hand on those that it is given
    cut_inputs: set[Path] = field(default_factory=set)  # which those are
    reached: bool = True  # it ran when the plan was made
    recomputed: str = ""  # a call of its own code that a checkpoint recomputes, and that must be edited
    inner: bool = False  # it only works inside the model's forward: its edges are cut, or entered further out

    @property
    def does_something(self) -> bool:
        """Whether the module needs any of this."""
        return bool(self.params or self.inputs or self.outputs or self.edits_calls or self.holds_cut)

    @property
    def edits_calls(self) -> bool:
        """Whether the module's own calls are changed, so that it must run under a mode."""
        return any(e for edits in self.calls.values() for e in edits)


class Hoisting:
    """Builds the programs of all modules from an analysis."""

    def __init__(self, analysis: Analysis) -> None:
        self.a, self.trace = analysis, analysis.trace
        self.programs: dict[str, ModuleProgram] = {}
        self.edits = {c: _copy(e) for c, e in analysis.edits.items()}
        self.runs: dict[str, list[int]] = defaultdict(list)
        for m in self.trace.modules:
            self.runs[m.path].append(m.index)
        self.written = {t for op in self.trace.ops for t in op.writes}
        self.readers: dict[int, list[Call]] = defaultdict(list)
        for c in self.trace.calls:
            for x in c.leaves:
                if isinstance(x, Ref) and (not self.readers[x.tid] or self.readers[x.tid][-1] is not c):
                    self.readers[x.tid].append(c)

    def run(self) -> dict[str, ModuleProgram]:
        """Programs by module path."""
        self._params()
        self._inputs()
        self._outputs()
        self._returned()
        runs: dict[tuple[int, Site], list[CallEdit]] = defaultdict(list)
        for c in self.trace.calls:
            if c.module >= 0:
                runs[c.module, c.site].append(self.edits[c.index])
                self._program(self.trace.module_path(c)).funcs[c.site] = c.func
        for (module, site), edits in runs.items():  # of several runs, which are edited alike, the longest
            path = self.trace.modules[module].path
            calls = self._program(path).calls
            before = calls.get(site, [])
            if any(a != b for a, b in zip(before, edits, strict=False)):
                raise PlanError(
                    f"{path}: its runs would have to be edited in different ways at {torch_frames.describe_site(site)}"
                )
            calls[site] = max(before, edits, key=len)
        self._guards()
        self._runs()
        self._recomputed()
        for program in self.programs.values():
            program.calls = {site: _folded(edits) for site, edits in program.calls.items()}
        for path, like in self.trace.skipped:
            for other in [p for p in self.programs if p == like or p.startswith(like + ".")]:
                self.programs[path + other[len(like) :]] = replace(self.programs[other], path=path + other[len(like) :])
        return self.programs

    def _program(self, path: str) -> ModuleProgram:
        return self.programs.setdefault(path, ModuleProgram(path))

    def _guards(self) -> None:
        """Modules whose own code handles cut tensors, and how each was called."""

        def apart(tid: int) -> bool:
            return bool(self.a.dealing.sets(tid)) or self.a.own.disjoint(tid) is not None

        for c in self.trace.calls:
            refs = [
                x.tid for x in (*c.leaves, *c.outs) if isinstance(x, Ref) and not self.trace.tensors[x.tid].parameter
            ]
            if c.module >= 0 and any(apart(t) for t in refs):
                own = self._program(self.trace.module_path(c))
                own.holds_cut = own.touches_cut = True
            if c.module >= 0:
                for site in c.inner:
                    self._program(self.trace.module_path(c)).calls.setdefault(site, [CallEdit()])
        for m in self.trace.modules:
            if m.parent >= 0 and any(apart(t) for t in (*m.inputs.values(), *m.outputs.values())):
                around = self._program(self.trace.modules[m.parent].path)
                around.holds_cut = True
                around.touches_cut |= any(apart(t) for t in m.outputs.values())
        ran = {m.path for m in self.trace.modules}
        for path, one in self.programs.items():
            one.reached = path in ran
        entered = {(m.index, m.inputs[p]) for m in self.trace.modules for p in self._edge(m)}
        for m in self.trace.modules:
            program = self.programs.get(m.path)
            if program is not None:
                program.kinds |= {m.kinds}
                edges = (*m.inputs.values(), *(m.outputs.values() if m.parent >= 0 else ()))
                outside = self._entered_outside(m, entered)
                program.inner |= any(apart(t) for t in edges) or outside
                program.touches_cut |= outside
                program.cut_inputs |= {path for path, t in m.inputs.items() if apart(t)}

    def _recomputed(self) -> None:
        """Calls of a module's own code inside of a checkpoint, which runs them again outside of the module."""
        for c in self.trace.calls:
            if c.module < 0 or not torch_frames.in_checkpoint(c.site):
                continue
            reads = any(isinstance(x, Ref) and self.trace.tensors[x.tid].parameter for x in c.leaves)
            if reads or self.edits[c.index]:
                program = self._program(self.trace.module_path(c))
                program.recomputed = f"{c.name} at {torch_frames.describe_site(c.site)}"

    def _runs(self) -> None:
        edited: dict[int, set[Site]] = defaultdict(set)
        for c in self.trace.calls:
            if c.module >= 0 and self.edits[c.index]:
                edited[c.module].add(c.site)
        for m in self.trace.modules:
            if m.path in self.programs:
                self.programs[m.path].runs.add(frozenset(edited[m.index]))

    def _edge(self, m: ModuleCall) -> list[Path]:
        program = self.programs.get(m.path)
        return [p for p in program.inputs if p in m.inputs] if program is not None else []

    def _entered_outside(self, m: ModuleCall, entered: set[tuple[int, int]]) -> bool:
        """Whether one of its inputs is entered at the edge of a module around it."""
        at = m.parent
        while at >= 0:
            if any((at, t) in entered for t in m.inputs.values()):
                return True
            at = self.trace.modules[at].parent
        return False

    # ------------------------------------------------------------ parameters
    def _params(self) -> None:
        owners: dict[int, dict[str, str]] = defaultdict(dict)
        for name, tid in self.trace.leaves.items():
            path, _, attr = name.rpartition(".")
            if self.trace.tensors[tid].parameter or self.a.dealing.sets(tid):
                owners[tid][path] = attr
                kept = tid in self.a.dealing.at_rest
                self._program(path).params[attr] = OperandEdit(gather=_cuts(self.a.dealing.sets(tid)) if kept else ())
        for tid, places in owners.items():
            by_path: dict[str, list[tuple[Call, int]]] = defaultdict(list)
            for c in self.readers.get(tid, []):
                leaves = [i for i, x in enumerate(c.leaves) if isinstance(x, Ref) and x.tid == tid]
                by_path[self.trace.module_path(c) if c.module >= 0 else ""] += [(c, i) for i in leaves]
            for path, uses in by_path.items():
                self._param_uses(places.get(path), path, uses)

    def _param_uses(self, attr: str | None, path: str, uses: list[tuple[Call, int]]) -> None:
        if attr is None:
            for c, _ in uses:
                self.edits[c.index].local = True
            return
        edits = {self.edits[c.index].operands.get(i, OperandEdit()) for c, i in uses}
        if len(edits) == 1 and self._gets_tokens(path, next(iter(edits)).stream):
            self._program(path).params[attr] = edits.pop()
            for c, i in uses:
                self.edits[c.index].operands.pop(i, None)

    def _gets_tokens(self, path: str, stream: int | None) -> bool:
        """Whether a module gets tokens of a stream, so that their number is known before it runs."""
        own = self.a.own
        inputs = [m.inputs.values() for m in self.trace.modules if m.path == path]
        owners = [[o for o in map(own.owners, tids) if o is not None] for tids in inputs]
        return stream is None or all(any(own.streams.of(o) == stream for o in found) for found in owners)

    # ------------------------------------------------------------ inputs
    def _inputs(self) -> None:
        places = self._places()
        while True:
            uses: dict[Edge, list[Use]] = defaultdict(list)
            for use, found in places.items():
                if found:
                    uses[found[-1].module, found[-1].path].append(use)
            stuck = {(use.where, use.leaf) for use, found in places.items() if not found}
            bad = [
                edge
                for edge, of in uses.items()
                if not self._whole(edge, [places[u][-1] for u in of], len(of))
                or any((u.where, u.leaf) in stuck for u in of)  # reached in several runs: none or all move
            ]
            for use in [use for edge in bad for use in uses[edge]]:
                places[use].pop()
            if not bad:
                break
        for (module, path), of in uses.items():
            self._program(module).inputs[path] = self.edits[of[0].call].operands[of[0].leaf]
            for use in of:
                self.edits[use.call].operands.pop(use.leaf)

    def _places(self) -> dict[Use, list[Place]]:
        """For every operand that is edited the edges that could do it instead, from the inside out."""
        found = {}
        turns: Counter[tuple[int, Site]] = Counter()
        for c in self.trace.calls:
            turn = turns[c.module, c.site]
            turns[c.module, c.site] += 1
            for i, edit in self.edits[c.index].operands.items():
                where = (self.trace.module_path(c) if c.module >= 0 else "", c.site, turn)
                found[Use(c.index, i, where)] = self._around(c, c.leaves[i].tid, edit)
        return found

    def _around(self, call: Call, tid: int, edit: OperandEdit) -> list[Place]:
        """The module runs around a call that get the tensor as an input which all their readers enter."""
        found: list[Place] = []
        stays = edit.gather or edit.slice or edit.once or edit.sum or edit.stream is not None
        at = -1 if stays or not edit.enter else call.module
        while at >= 0:
            m = self.trace.modules[at]
            paths = [p for p, t in m.inputs.items() if t == tid]
            if len(paths) != 1 or len(paths[0]) != _DIRECT or not self._all_enter(m, tid, edit):
                break  # a container's other readers must not get what is entered here, nor lose what is put into it
            found.append(Place(m.path, paths[0], at, tid))
            at = m.parent
        return found

    def _whole(self, edge: Edge, at: list[Place], uses: int) -> bool:
        """Whether these uses are all of them, in every run of the module: the edge acts on all that reads the input."""
        reading = sum(len(self._reading(self.trace.modules[p.run], p.tid)) for p in set(at))
        return {p.run for p in at} == set(self.runs[edge[0]]) and reading == uses

    def _reading(self, m: ModuleCall, tid: int) -> list[tuple[Call, int]]:
        """The operands inside a run of a module that are this tensor."""
        inside = [c for c in self.readers[tid] if m.start <= c.index < m.stop]
        return [(c, i) for c in inside for i, x in enumerate(c.leaves) if isinstance(x, Ref) and x.tid == tid]

    def _all_enter(self, m: ModuleCall, tid: int, edit: OperandEdit) -> bool:
        returned = tid in m.outputs.values()
        same = all(self.a.edits[c.index].operands.get(i) == edit for c, i in self._reading(m, tid))
        return same and not returned and tid not in self.written

    # ------------------------------------------------------------ outputs
    def _outputs(self) -> None:
        kept = self._kept()
        wanted: dict[tuple[str, Path], list[tuple[Call, int]]] = defaultdict(list)
        for c in self.trace.calls:
            for i in self.edits[c.index].results:
                m = self.trace.modules[c.module] if c.module >= 0 else None
                tid = c.outs[i].tid
                if m is None or tid in kept or any(m.start <= r.index < m.stop for r in self.readers[tid]):
                    continue
                if self.edits[c.index].results[i].of_tokens and m.stop > c.index + 1:
                    continue  # its shape may be read before the next call
                if [p for p, t in m.outputs.items() if t == tid] == [()]:  # not in a container, which others may have
                    wanted[m.path, ()].append((c, i))
        for (module, path), uses in wanted.items():
            results = {self.edits[c.index].results[i] for c, i in uses}
            if len(uses) == len(self.runs[module]) and len(results) == 1:
                self._program(module).outputs[path] = results.pop()
                for c, i in uses:
                    self.edits[c.index].results.pop(i)

    def _returned(self) -> None:
        """What stays cut up to the end, because a loss reads it so, is put together where the model returns it."""
        for path, tid in self.a.returned_cut.items():
            self._program("").outputs[path] = ResultEdit(gather=_cuts(self.a.dealing.sets(tid)))

    def _kept(self) -> set[int]:
        """Tensors that the forward leaves in attributes, where they are read beside what the module returns."""
        given = Counter(t for m in self.trace.modules if m.parent < 0 for t in m.outputs.values())
        return set(Counter(self.trace.outputs) - given)


def _cuts(sets: Sets) -> Cuts:
    return tuple(sorted(sets.items()))


def _copy(e: CallEdit) -> CallEdit:
    numbers = {r: dict(n) for r, n in e.numbers.items()}
    return replace(e, operands=dict(e.operands), results=dict(e.results), numbers=numbers)


def _folded(edits: list[CallEdit]) -> list[CallEdit]:
    """One edit if a place is edited alike each time it is reached (loops, shared modules)."""
    return edits[:1] if all(e == edits[0] for e in edits[1:]) else edits
