"""Which sums and gradients would be a rank's part, were a foreign plan run as torch and transformers run it.

Forward, a value is *whole*, *cut*, or a *sum in parts* that some module completes at its output. Backward, the gradient
of a whole value is *complete* on every rank, or *partial* where the value is used together with cut ones; the row of
a module (at its inputs) or of a parameter may sum it. A gradient that is partial where it ends, or summed though it is
complete, is a fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotp.foreign import ENTERS, GRADIENTS, LATENT, SUMS, Claims
from autotp.ownership.engine import Ownership
from autotp.ownership.registry import rule_of
from autotp.ownership.rules_movement import movement
from autotp.record import Call, ModuleCall, Op

COMPLETE = -1  # in place of the operation where a partial gradient comes from
Status = set[int]
Where = tuple[int, int]  # a module run that sums the gradients of its inputs (-1: none), and a tensor

_LINEAR = {"sum", "mean", "index_select", "index", "gather", "index_add", "index_add_", "cat", "mul", "div", "mul_"}


@dataclass
class Flow:
    """Follows one run. `faults` are (parameter or module, what would be wrong)."""

    own: Ownership
    claims: Claims
    faults: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trace = self.own.trace
        self.late: dict[int, int] = {}  # a sum in parts -> the module run that completes it
        self.rope = {t: m for m in self.trace.modules if self.style(m) == LATENT for t in m.outputs.values()}
        self.status: dict[Where, Status] = defaultdict(set)
        self.partial: dict[int, list[tuple[str, str]]] = defaultdict(list)  # where from -> what is spoiled

    def run(self) -> Flow:
        """Sums first, then gradients."""
        self._sums()
        for event in self._backward():
            if isinstance(event, ModuleCall):
                self._module(event)
            else:
                self._op(event, self.trace.ops[event])
        self._parameters()
        self._origins()
        return self

    def around(self, call: Call) -> Iterator[ModuleCall]:
        """The module runs around a call, the innermost first."""
        at = call.module
        while at >= 0:
            yield self.trace.modules[at]
            at = self.trace.modules[at].parent

    def style(self, m: ModuleCall) -> str:
        """The style that a module run has a row for."""
        return self.claims.modules.get(m.path, ("", ""))[0]

    # ------------------------------------------------------------ sums
    def _sums(self) -> None:
        completed: set[str] = set()
        for call in self.trace.calls:
            for op in self.trace.ops[call.start : call.stop]:
                self._carry(op, call)
            for t in {t for op in self.trace.ops[call.start : call.stop] for t in op.outs} & set(self.own.leave):
                m = next((m for m in self.around(call) if self.style(m) in SUMS), None)
                if m is None:
                    self._fault(call, f"{call.name} gives a sum in parts, and no row has it summed over the ranks")
                    continue
                completed.add(m.path)
                if t not in m.outputs.values():
                    self._late(t, m, call)
        for m in self.trace.modules:
            if self.style(m) in SUMS and m.path not in completed and m.same_as < 0:
                text = f"its output is whole on every rank: to sum it over the ranks ({self.style(m)}) multiplies it"
                self.faults.append((m.path, text))

    def _late(self, t: int, m: ModuleCall, call: Call) -> None:
        self.late[t] = m.index
        wants = [w for i in range(call.start, call.stop) for w in self.own.wants[i]]
        for name in {self.trace.tensors[w.tid].leaf for w in wants if w.kind == "once"}:
            text = f"is added on every rank to a sum in parts, which {m.path} completes at its output only"
            self.faults.append((name or m.path, text))

    def _carry(self, op: Op, call: Call) -> None:
        """A sum in parts may be moved, scaled and added to others until its module completes it."""
        parts = [t for t in op.ins if t in self.late and call.index < self.trace.modules[self.late[t]].stop]
        if not parts:
            return
        name = op.func.overloadpacket.__name__
        others = [t for t in dict.fromkeys(op.ins) if t not in parts]
        floats = [t for t in others if self.trace.tensors[t].dtype.is_floating_point]
        added = name in ("add", "add_", "index_add", "index_add_", "cat", "sub")
        linear = rule_of(op.func) is movement or name in _LINEAR or added
        if not linear or (added and not all(self._is_zero(t) for t in floats)) or (not added and len(parts) > 1):
            path = self.trace.modules[self.late[parts[0]]].path
            self._fault(call, f"{name} works on a sum in parts, which {path} completes at its output only")
            return
        self.late.update(dict.fromkeys((t for t in op.outs if t >= 0), self.late[parts[0]]))

    def _is_zero(self, tid: int) -> bool:
        makers = [op for op in self.trace.ops if tid in op.outs and tid not in op.writes]
        return all(op.func.overloadpacket.__name__ in ("zeros_like", "zeros", "new_zeros") for op in makers)

    def _fault(self, call: Call, text: str) -> None:
        self.faults.append((self.trace.module_path(call) if call.module >= 0 else "", text))

    # ------------------------------------------------------------ gradients
    def _backward(self) -> Iterator[int | ModuleCall]:
        """Operations and edges of module runs, from the last to the first."""
        for t in self.trace.outputs:
            self.status[-1, t].add(COMPLETE)
        edges: dict[int, list[ModuleCall]] = defaultdict(list)
        for m in self.trace.modules:
            if m.same_as >= 0 or self.style(m) in ENTERS:
                edges[m.start].append(m)
        for call in reversed(self.trace.calls):
            yield from reversed(edges.pop(call.index + 1, []))
            yield from reversed(range(call.start, call.stop))
        for start in sorted(edges, reverse=True):
            yield from reversed(edges[start])

    def _where(self, tid: int, m: ModuleCall | None) -> Where:
        """Where the gradient of a tensor used inside a module run adds up."""
        while m is not None:
            if self.style(m) in ENTERS and tid in m.inputs.values():
                return m.index, tid
            m = self.trace.modules[m.parent] if m.parent >= 0 else None
        return -1, tid

    def _module(self, m: ModuleCall) -> None:
        parent = self.trace.modules[m.parent] if m.parent >= 0 else None
        if m.same_as >= 0:
            out = {s for t in m.outputs.values() for s in self.status[self._where(t, parent)]}
            for t in m.inputs.values():
                self.status[self._where(t, parent)] |= out
            return
        for t in dict.fromkeys(m.inputs.values()):
            inner = self.status[m.index, t]
            if self._floats(t) and COMPLETE in inner:
                text = f"the gradient of its input is complete already: to sum it ({self.style(m)}) multiplies it"
                self.faults.append((m.path, text))
            if inner:
                self.status[self._where(t, parent)].add(COMPLETE)

    def _floats(self, tid: int) -> bool:
        return self.trace.tensors[tid].grad

    def _op(self, i: int, op: Op) -> None:
        call = self.trace.calls[op.call]
        m = self.trace.modules[call.module] if call.module >= 0 else None
        status: Status = set()
        for t in op.outs:
            if t >= 0:
                status |= self._summed_rope(t, op, self.status[self._where(t, m)])
        if not status or not self._gradient_flows(op):
            return
        if self._closes(op) and status != {COMPLETE}:
            origin = max(status)
            self._partial(origin, f"the gradient that comes back to {call.name} in {self.trace.module_path(call)}")
        inside = any(t >= 0 and self._cut_inside(t) for t in op.outs)
        for t in dict.fromkeys(op.ins):
            if self._floats(t):
                parts = self._cut_inside(t) and not self._closed_before(t, op)
                self.status[self._where(t, m)] |= {COMPLETE} if parts else self._into(i, t, status, inside)

    def _closed_before(self, t: int, op: Op) -> bool:
        """Whether a value that was cut, or a sum in parts, had been put together when an operation read it."""
        if self.own.is_cut(t):
            return False
        if t in self.late:
            return op.call >= self.trace.modules[self.late[t]].stop
        return self.own.made_in.get(t) != op.call

    def _into(self, i: int, t: int, status: Status, inside: bool) -> Status:
        """What an operation adds to the gradient of a whole operand."""
        if not inside:
            return status
        op = self.trace.ops[i]
        wants = [w for w in self.own.wants[i] if w.tid == t]
        if any(w.kind == "once" for w in wants):
            return status
        late = any(out in self.late for out in op.outs) and op.func.overloadpacket.__name__ in ("mul", "div", "mul_")
        return {i} if wants or late else set()

    def _gradient_flows(self, op: Op) -> bool:
        return any(t >= 0 and self._floats(t) for t in op.outs)

    def _cut_inside(self, t: int) -> bool:
        """Whether a result is cut or a sum in parts when it is computed."""
        return self.own.is_cut(t) or t in self.own.gathered or t in self.own.was_partial or t in self.late

    def _closes(self, op: Op) -> bool:
        """Whether a cut region ends with this operation."""
        return any(t in self.own.gathered or t in self.own.leave for t in op.outs)

    def _summed_rope(self, t: int, op: Op, status: Status) -> Status:
        """The shared part of a latent projection, whose gradient that projection's row sums."""
        run = next((self.rope[x] for x in op.ins if x in self.rope), None)
        if run is None or not status or self.trace.tensors[t].shape[-1:] != (self.claims.rope,):
            return status
        if COMPLETE in status:
            text = f"the gradient of its last {self.claims.rope} outputs is complete already: to sum it multiplies it"
            self.faults.append((run.path, text))
        return {COMPLETE}

    # ------------------------------------------------------------ where gradients end
    def _parameters(self) -> None:
        for name, tid in self.trace.leaves.items():
            info = self.trace.tensors[tid]
            status = self.status[-1, tid]
            if not info.parameter or self.own.is_cut(tid) or not status or self.trace.canonical[name] != name:
                continue
            claim = self.claims.params[name]
            if claim.style == GRADIENTS:
                if COMPLETE in status:
                    text = "its gradient is complete on every rank already: to sum it over the ranks multiplies it"
                    self.faults.append((name, text))
            elif status != {COMPLETE}:
                self._partial(max(status), "its gradient", name)
        for t in self._inputs():
            if self.status[-1, t] - {COMPLETE}:
                self._partial(max(self.status[-1, t]), "the gradient of an input of the model")

    def _inputs(self) -> list[int]:
        made = self.own.made_in
        return [t for t, info in enumerate(self.trace.tensors) if info.leaf is None and info.grad and t not in made]

    def _partial(self, origin: int, what: str, name: str = "") -> None:
        self.partial[origin].append((name, what))

    def _origins(self) -> None:
        """One fault for each place where a partial gradient comes from, named by the nearest thing it spoils."""
        for origin, spoiled in self.partial.items():
            call = self.trace.calls[self.trace.ops[origin].call]
            path = self.trace.module_path(call) if call.module >= 0 else ""
            name, what = next(((n, w) for n, w in spoiled if n), spoiled[0])
            others = f", and {len(spoiled) - 1} more before it" if len(spoiled) > 1 else ""
            place = f"{call.name} of {path}" if path else call.name
            text = f"{what} would be a rank's part only{others}: a whole value meets cut ones in {place}"
            self.faults.append((name or path, text))


def gradient_faults(own: Ownership, claims: Claims) -> list[tuple[str, str]]:
    """(Where, what) of every sum and gradient that a plan gets wrong."""
    return list(dict.fromkeys(Flow(own, claims).run().faults))
