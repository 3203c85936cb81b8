"""Is what a foreign plan says so? It is followed through a recorded run, as torch and transformers would run it.

    layout      every group of indices that must be together lies on one rank
    wholeness   nothing that is cut reaches a call that needs it whole; nothing whole is there where a part is due
    sums        every partial sum is completed by a row, once, and rows complete nothing that is whole
    gradients   every gradient is complete: where a whole value is used with cut ones, a row sums its gradient

The first comes from the ownership analysis with the plan's cuts and no limit on groups; the others from the edits that
a rank's program needs: each must be what some row provides. What rows cannot say (numbers in the model's code,
constants that are cut) autotp does by itself; it is told as a warning, since stock styles would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from autotp import torch_ops
from autotp.call_edits import CannotEdit
from autotp.folding import fold_findings
from autotp.foreign import GATHERS, SPLITS, Claim, Claims, ForeignPlan, resolve
from autotp.foreign_gradients import gradient_faults
from autotp.foreign_layout import NOWHERE, Grouped, Stated
from autotp.ownership.choices import Choices
from autotp.ownership.dealing import NotARectangle
from autotp.ownership.engine import Ownership
from autotp.ownership.rules_movement import IDENTITY
from autotp.plan_types import Finding
from autotp.program import Lowering
from autotp.record import Call, Trace
from autotp.repeats import whole_edges
from autotp.search import Analysis
from autotp.trace import trace
from autotp.trees import Ref

UNSOUND, UNPROVEN, APART = "TP-UNSOUND", "TP-UNPROVEN", "TP-STOCK"

Site = tuple[str, tuple[Any, ...]]  # a call by its module and its place in the code


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of it: `faults` (the plan is unsound if there are any), `notes`, and the choices to apply it by."""

    faults: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    dims: dict[str, int | None]
    closed: frozenset[str]  # modules whose output is gathered
    counted: frozenset[Site] = frozenset()  # calls that repeat a value as often as there are cut indices


class Retrace(Exception):
    """Blocks that are alike are treated differently by the plan: they must be recorded one by one."""


@dataclass
class Check:
    """One plan on one recorded run. Each list collects (parameter or module, text): `found` what would be wrong,
    `open` what the analysis has no answer to, `told` what rows cannot say."""

    model: nn.Module
    trace: Trace
    claims: Claims
    tp: int
    found: list[tuple[str, str]] = field(default_factory=list)
    open: list[tuple[str, str]] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    counted: set[Site] = field(default_factory=set)

    def run(self) -> Verdict:
        """Follow the plan; later questions are asked only if the earlier ones have an answer."""
        self._folded_alike()
        dims = {name: claim.dim for name, claim in self._of_tensors().items()}
        closed = frozenset(path for path, (style, _) in self.claims.modules.items() if style in GATHERS)
        self._modules()
        own = self._followed(dims, closed)
        self._unread(own, dims)
        self._torn(own)
        self._needed_whole(own)
        if not self.open:  # else it may be all of a piece with what has no answer
            self._not_as_said(own, closed)
        if not self.found and not self.open:
            self._slices(own)
        if not self.found and not self.open:
            self.found += gradient_faults(own, self.claims)
        faults = self._findings(UNSOUND, "error", self.found) + self._findings(UNPROVEN, "error", self.open)
        notes = self._findings(APART, "warning", self.told)
        notes += [Finding(code="TP-UNUSED", level="warning", where="", message=_unused(k)) for k in self.claims.unused]
        return Verdict(
            faults=tuple(faults), notes=tuple(notes), dims=dims, closed=closed, counted=frozenset(self.counted)
        )

    def _findings(self, code: str, level: str, pairs: list[tuple[str, str]]) -> list[Finding]:
        """What was found in a block goes for those that were followed as one with it."""
        likes = [(f"{like}.", f"{path}.") for path, like in self.trace.skipped]
        more = [
            (path + where.removeprefix(like), text.replace(like, path))
            for where, text in pairs
            for like, path in likes
            if where.startswith(like)
        ]
        return [
            Finding(code=code, level=level, where=where, message=text + self._row(where))
            for where, text in dict.fromkeys(pairs + more)
        ]

    def _row(self, where: str) -> str:
        claim = self.claims.params.get(where)
        style, key = (claim.style, claim.key) if claim else self.claims.modules.get(where, ("", ""))
        return f" (row {key!r}: {style})" if key else " (no row)" if claim else ""

    def _folded_alike(self) -> None:
        """Repeated blocks are followed as one, if the plan treats them as one."""
        for path, like in self.trace.skipped:
            for table in (self.claims.params, self.claims.modules):
                here = {n[len(path) :]: _kind(c) for n, c in table.items() if n == path or n.startswith(path + ".")}
                there = {n[len(like) :]: _kind(c) for n, c in table.items() if n == like or n.startswith(like + ".")}
                if here != there:
                    raise Retrace

    def _of_tensors(self) -> dict[str, Claim]:
        """The claim on every parameter; a tied one goes by whichever of its names has a row."""
        by_tid: dict[int, Claim] = {}
        for name, claim in self.claims.params.items():
            tid = self.trace.leaves[name]
            if claim.key or tid not in by_tid:
                by_tid[tid] = claim
        return {name: by_tid[self.trace.leaves[name]] for name in self.claims.params}

    def _modules(self) -> None:
        """Styles of layers that torch and transformers refuse elsewhere."""
        for path, (style, _) in self.claims.modules.items():
            module = self.model.get_submodule(path)
            if isinstance(module, nn.Embedding):
                if style == "rowwise":
                    text = "its token ids would be taken for a part of longer ones; write input_layouts=Replicate()"
                    self.found.append((path, text))
            elif style in LINEAR_ONLY and not hasattr(module, "out_features"):
                self.found.append((path, f"is a {type(module).__name__}, but {style} is for linear layers"))

    # ------------------------------------------------------------ following
    def _followed(self, dims: dict[str, int | None], closed: frozenset[str]) -> Ownership:
        """The ownership pass with these cuts, with gathers where the plan has them, and no limit on groups."""
        forced = {self.trace.leaves[name]: dim for name, dim in dims.items()}
        gather = frozenset(t for m in self.trace.modules if m.path in closed for t in m.outputs.values())
        own = Ownership(self.trace, 1, Choices(forced, gather, self.trace.shut))
        stated = np.full(len(own.nodes.parent), NOWHERE)
        for name, claim in self._of_tensors().items():
            tid = self.trace.leaves[name]
            if claim.dim is not None:
                base, size = own.base[tid, claim.dim], own.shape(tid)[claim.dim]
                ranks = claim.ranks(size, self.tp)
                stated[base : base + size] = ranks
                if len(set(ranks)) < self.tp:
                    self.found.append((name, f"{size} along dim {claim.dim} leave some of {self.tp} ranks with none"))
        self.nodes = own.nodes = own.streams.nodes = Grouped(own, stated)
        own.run()
        if not whole_edges(self.trace, own.is_cut):
            raise Retrace
        return own

    def _unread(self, own: Ownership, dims: dict[str, int | None]) -> None:
        """What the forward does not use stays whole: nothing can be said of it."""
        read = {t for op in self.trace.ops for t in op.ins}
        for name, dim in dims.items():
            if dim is not None and self.trace.leaves[name] not in read:
                dims[name] = None
                self.told.append((name, "is not used by the forward that was traced, so it stays whole"))

    def _torn(self, own: Ownership) -> None:
        """Groups whose indices the plan puts on different ranks."""
        blamed: set[str] = set()
        for at, a, b in self.nodes.torn:
            (name, dim, i), (other, _, j) = self._place(own, a), self._place(own, b)
            if {name, other} <= blamed:
                continue
            blamed |= {name, other}
            call = self.trace.calls[self.trace.ops[at].call]
            ranks = f"are on ranks {self.nodes.stated[a]} and {self.nodes.stated[b]}"
            which = (
                f"indices {i} and {j} of dim {dim}" if name == other else f"index {i} of dim {dim} and {j} of {other}"
            )
            text = f"{which} {ranks}, but meet in {self._call(call)}: its result would be wrong"
            self.found.append((name, text))

    def _place(self, own: Ownership, node: int) -> tuple[str, int, int]:
        tid, dim = max((k for k, base in own.base.items() if base <= node), key=lambda k: own.base[k])
        return self.trace.tensors[tid].leaf or "", dim, node - own.base[tid, dim]

    def _needed_whole(self, own: Ownership) -> None:
        """Tensors of which a rank would hold a part where all of it is needed."""
        asked = dict(own.new_gather)
        for t in self.trace.outputs:
            if own.is_cut(t):
                asked.setdefault(t, "it is returned by the model")
        for t, reason in asked.items():
            self._part(own, t, reason)
        for index, reason in own.new_opaque.items():
            self.open.append((self._path(self.trace.calls[index]), f"{self.trace.calls[index].name}: {reason}"))
        for index in own.shared:
            call = self.trace.calls[index]
            text = f"{call.name} runs over features of which a rank has its part only: its result would be wrong"
            self.found.append((self._path(call), text))

    def _part(self, own: Ownership, tid: int, reason: str) -> None:
        names = self._cut_by(own, tid)
        unknown = (
            reason.startswith("op ") or "no rule" in reason or "writes into" in reason
        )  # of these the analysis knows nothing better
        ends = "of which nothing is known but for the whole" if unknown else "which is needed whole"
        text = f"a rank would have only its part of {self._tensor(own, tid)}, {ends}: {reason}"
        (self.open if unknown else self.found).append((names[0] if names else "", text))

    def _cut_by(self, own: Ownership, tid: int) -> list[str]:
        """Parameters whose cut a tensor has taken over, those that gave it as outputs first."""
        owners = own.owners(tid)
        if owners is None:
            return []
        groups = own.nodes.distinct(owners)
        found = []
        for param, dim in own.cut.items():
            base = own.base[param, dim]
            if np.isin(own.nodes.find(np.arange(base, base + own.shape(param)[dim])), groups).any():
                found.append((own.roles.get(param, {}).get(dim) == "in", param))
        return [self.trace.tensors[param].leaf or "" for _, param in sorted(found)]

    def _not_as_said(self, own: Ownership, closed: frozenset[str]) -> None:
        """Rows whose parameters could not be cut, or whose input or output is not what they take it for."""
        claims = self._of_tensors()
        read = {t for op in self.trace.ops for t in op.ins}
        for name, claim in claims.items():
            tid = self.trace.leaves[name]
            if claim.dim is None or tid not in read or self.trace.tensors[tid].leaf != name:
                continue
            if own.cut.get(tid) != claim.dim:
                reason = (own.reasons.get(tid) or ["it does not fit what computes with it"])[-1]
                self.found.append((name, f"cannot be cut along dim {claim.dim}: {reason}"))
            elif (tid in own.split_input) != (claim.style in SPLITS):
                self._input(own, name, claim)
        gathered = {m.path for m in self.trace.modules if set(m.outputs.values()) & set(own.gathered)}
        runs = {m.path for m in self.trace.modules if m.same_as < 0}
        for path in sorted((closed & runs) - gathered):
            self.found.append((path, "its output is whole on every rank already: there is nothing to gather"))

    def _input(self, own: Ownership, name: str, claim: Claim) -> None:
        size = own.shape(self.trace.leaves[name])[claim.dim or 0]
        if claim.style in SPLITS:
            if own.roles.get(self.trace.leaves[name], {}).get(claim.dim or 0) == "in":
                self.found.append((name, f"its input is cut already, but is taken for a whole one of {size} features"))
        else:
            text = f"its input is whole: {size} features meet a rank's {-(-size // self.tp)}; no row cuts what feeds it"
            self.found.append((name, text))

    # ------------------------------------------------------------ slices
    def _slices(self, own: Ownership) -> None:
        """Whole values of which a part is due: told where they are constants, a fault where they are not."""
        try:
            edits = Lowering(own, Stated(own, self.tp, self.nodes.label)).edits()
        except CannotEdit as e:
            self.open.append((self._path(self.trace.calls[e.call]), e.why))
            return
        except NotARectangle as e:
            self._part(own, e.tid, "a rank's part is no rectangle of it")
            return
        for call in self.trace.calls:
            for i, edit in edits[call.index].operands.items():
                tid = call.leaves[i].tid
                if edit.slice and not self._provided(own, call, tid) and not self._repeats(tid, dict(edit.slice)):
                    self._sliced(own, call, tid)

    def _provided(self, own: Ownership, call: Call, tid: int) -> bool:
        params = [x.tid for x in call.leaves if isinstance(x, Ref) and self.trace.tensors[x.tid].parameter]
        return tid not in params and any(p in own.split_input for p in params)

    def _repeats(self, tid: int, dims: Iterable[int]) -> bool:
        """Whether a tensor is the same all along some dims because it was expanded there: then it is only counted."""
        op = next((op for op in self.trace.ops if tid in op.outs and tid not in op.writes), None)
        if op is None:
            return False
        call, shape = self.trace.calls[op.call], self.trace.tensors[tid].shape
        if op.func.overloadpacket.__name__ == "expand":
            source = self.trace.tensors[op.ins[0]].shape
            longer = len(shape) - len(source)
            if all(d < longer or source[d - longer] == 1 for d in dims):
                self.counted.add((self._path(call), call.site))
                return True
            return False
        same = [t for t in dict.fromkeys(op.ins) if len(self.trace.tensors[t].shape) == len(shape)]
        alike = torch_ops.is_pointwise(op.func) or op.func.overloadpacket.__name__ in IDENTITY
        full = [t for t in same if any(self.trace.tensors[t].shape[d] > 1 for d in dims)]
        return alike and bool(full) and len(same) == len(set(op.ins)) and all(self._repeats(t, dims) for t in full)

    def _sliced(self, own: Ownership, call: Call, tid: int) -> None:
        text = f"{self._tensor(own, tid)} is whole, but meets a rank's part in {self._call(call)}"
        where = self._source(own, tid) or self._path(call)
        if self.trace.tensors[tid].grad:
            self.found.append((where, f"{text}: its result would be wrong"))
        else:
            self.told.append((where, f"{text}; autotp slices it, stock styles do not"))

    def _source(self, own: Ownership, tid: int) -> str:
        """The nearest leaf that a tensor was computed from."""
        seen, waiting = set(), [tid]
        while waiting:
            here = waiting.pop(0)
            leaf = self.trace.tensors[here].leaf
            if leaf is not None:
                return leaf
            made = own.made_in.get(here)
            if made is not None and made not in seen:
                seen.add(made)
                refs = [x.tid for x in self.trace.calls[made].leaves if isinstance(x, Ref)]
                waiting += sorted(refs, key=lambda t: self.trace.tensors[t].leaf is None)
        return ""

    # ------------------------------------------------------------ words
    def _path(self, call: Call) -> str:
        return self.trace.module_path(call) if call.module >= 0 else ""

    def _call(self, call: Call) -> str:
        return f"{call.name} of {self._path(call) or type(self.model).__name__}"

    def _tensor(self, own: Ownership, tid: int) -> str:
        info = self.trace.tensors[tid]
        sizes = list(info.shape)
        if info.leaf is not None:
            return f"{info.leaf} {sizes}"
        made = own.made_in.get(tid)
        if made is None:
            return f"an input {sizes}"
        call = self.trace.calls[made]
        given = any(isinstance(x, Ref) and x.tid == tid for x in call.outs)
        return f"{'the result' if given else 'a value'} {sizes} {'of' if given else 'in'} {self._call(call)}"


def judge(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Trace, plan: ForeignPlan, tp: int
) -> tuple[Verdict, Trace]:
    """Follow a foreign plan over ``tp`` ranks; also the record to plan by, which has more in it where needed.

    Raises:
        PlanError: rows that cannot be matched to the model (see :func:`autotp.foreign.resolve`).
    """
    claims = resolve(model, plan)
    try:
        return Check(model, record, claims, tp).run(), record
    except Retrace:
        record = trace(model, args, kwargs, fold=False, drive=record.drive)
        return Check(model, record, claims, tp).run(), record


LINEAR_ONLY = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input"})


def _kind(claim: Claim | tuple[str, str]) -> Any:
    return (claim.style, claim.dim, claim.parts) if isinstance(claim, Claim) else claim[0]


def _unused(key: str) -> str:
    return f"row {key!r} matches nothing in the model"


def as_text(faults: Sequence[Finding], tp: int, limit: int = 8) -> str:
    """What is wrong with a plan, like layers folded."""
    unsound = [fault for fault in faults if fault.code == UNSOUND]
    verdict = "is unsound" if unsound else "cannot be proved"
    folded = fold_findings(unsound or faults)
    lines = [f"{f.where or '(model)'}: {f.message}" + (f" [{n} times]" if n > 1 else "") for f, n in folded]
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n  ".join([f"the plan given {verdict} over {tp} ranks:", *lines[:limit], *more])


def by_hand(analysis: Analysis, counted: frozenset[Site]) -> list[Finding]:
    """What a rank's program changes beyond what rows can say: numbers in the model's code.

    The number of times that a ``counted`` call repeats a value is right as it is if the code reads it from a rank's
    part; then autotp, which slices the value later, puts the whole model's number there.
    """
    found = []
    for call in analysis.trace.calls:
        path = analysis.trace.module_path(call) if call.module >= 0 else ""
        numbers = any(analysis.edits[call.index].numbers.values())
        if numbers != ((path, call.site) in counted):
            text = f"{call.name} has numbers of the whole model, which autotp changes and stock styles do not"
            found.append(Finding(code=APART, level="warning", where=path, message=text))
    return list(dict.fromkeys(found))
