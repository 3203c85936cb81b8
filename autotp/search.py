"""Find a program for the ranks: carry owners, lower to edits, prove; where that fails, choose again.

Each round either ends with a proof or makes at least one more tensor whole (gathered where it is computed, a call
that sees whole tensors only, or in the end a parameter left whole), so it ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from autotp import torch_ops
from autotp.call_edits import CallEdit, CannotEdit
from autotp.errors import ProofError
from autotp.ownership.choices import Choices
from autotp.ownership.dealing import Dealing, NotARectangle
from autotp.ownership.engine import Ownership
from autotp.ownership.registry import rule_of
from autotp.ownership.rules_movement import movement
from autotp.ownership.rules_pointwise import pointwise
from autotp.ownership.state import Disjoint, Owned, Weights
from autotp.program import Lowering
from autotp.proof import Prover, Unproven
from autotp.record import Call, Op, Trace
from autotp.repeats import whole_edges
from autotp.trees import Ref

MAX_ROUNDS = 400


class Refold(Exception):
    """Skipped blocks do not take and give whole tensors: the model must be traced block by block."""


@dataclass
class Analysis:
    """A proved program: owners, who got what, and the edits of every call."""

    trace: Trace
    own: Ownership
    dealing: Dealing
    edits: dict[int, CallEdit]
    notes: dict[int, str] = field(default_factory=dict)
    rounds: int = 0
    chosen: frozenset[int] = frozenset()  # parameters whose cut the user fixed

    @property
    def returned_cut(self) -> dict[tuple[Any, ...], int]:
        """What is cut up to the end because a loss reads it so, by its place in what the model returns."""
        back = [(path, t) for m in self.trace.modules if m.parent < 0 for path, t in m.outputs.items()]
        return {path: t for path, t in back if t in self.own.fed and self.dealing.sets(t)}


@dataclass
class Search:
    """The choices so far and why each was made."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trace: Trace
    tp: int
    choices: Choices
    notes: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ops = self.trace.ops
        self.producer = {t: op for op in reversed(ops) for t in op.outs if t >= 0}
        self.readers = Counter(t for op in ops for t in dict.fromkeys(op.ins))
        self.results = {x.tid for c in self.trace.calls for x in c.outs if isinstance(x, Ref)}
        self.results &= set(self.producer)
        self.by_site: dict[Any, list[int]] = {}
        self.in_runs: dict[Any, list[int]] = {}  # a place in a module's code -> its call in every run of the module
        self.place: dict[int, Any] = {}
        turns: Counter[Any] = Counter()
        for c in self.trace.calls:
            self.by_site.setdefault(c.site, []).append(c.index)
            turns[c.module, c.site] += 1
            self.place[c.index] = self.trace.module_path(c), c.module < 0, c.site, turns[c.module, c.site]
            self.in_runs.setdefault(self.place[c.index], []).append(c.index)

    def run(self) -> Analysis:
        for n in range(MAX_ROUNDS):
            own = Ownership(self.trace, self.tp, self.choices).run()
            self.cut_tensors = lambda t, own=own: isinstance(own.states.get(t), Owned)
            if self._from_rules(own):
                continue
            if not whole_edges(self.trace, own.is_apart):
                raise Refold
            try:
                dealing = Dealing(own)
                if self._room_unfit(own, dealing):
                    continue
                edits = self._edits(own, dealing)
                self._prove(dealing, edits)
            except NotARectangle as e:
                self._give_up_tensor(own, e.tid, "a rank's part of it is no tensor")
            except CannotEdit as e:
                self._give_up_call(own, e.call, e.why)
            except Unproven as e:
                self._give_up_operands(own, e.call, e.why, e.module)
            else:
                uneven = self._run_apart(edits)
                if uneven is not None:
                    self._give_up_operands(own, uneven, "its module runs several times and could not be edited alike")
                    continue
                return Analysis(self.trace, own, dealing, edits, self.notes, n + 1)
        raise ProofError(f"no program could be proved in {MAX_ROUNDS} rounds; please report the model")

    def _edits(self, own: Ownership, dealing: Dealing) -> dict[int, CallEdit]:
        return Lowering(own, dealing).edits()

    def _room_unfit(self, own: Ownership, dealing: Dealing) -> bool:
        """Buffers that would be cut along two dims at once, for which there is no layout: whole after all."""
        unfit = [
            t for t, room in self.choices.room.items()
            if room is not None and own.trace.tensors[t].leaf is not None and len(dealing.sets(t)) > 1
        ]  # fmt: skip
        self.choices = replace(self.choices, room={**self.choices.room, **dict.fromkeys(unfit, None)})
        return bool(unfit)

    def _prove(self, dealing: Dealing, edits: dict[int, CallEdit]) -> None:
        """Prove one rank of every different shape; ranks of equal shape take its numbers over, if they fit.

        They do if they move every element to its place there too. Where there are numbers to take over, the last rank
        is proved with them.
        """
        cut = [dealing.sets(t) for t in range(len(self.trace.tensors)) if isinstance(dealing.own.states.get(t), Owned)]
        cut += [dealing.sets(t) for t in self.trace.leaves.values()]
        proved: dict[tuple[Any, ...], Prover] = {}
        for rank in range(self.tp):
            key = tuple(tuple(len(s[rank]) for s in sets.values()) for sets in cut)
            prover, twin = Prover(self.trace, dealing, edits, rank), proved.get(key)
            if twin is not None:
                given = [dict(e.numbers.get(rank, {})) for e in edits.values()]
                for e in edits.values():
                    if e.numbers.get(twin.rank):
                        e.numbers[rank] = dict(e.numbers[twin.rank])
                numbers = any(e.numbers.get(rank) for e in edits.values())
                if prover.moves_alike(twin.moves) and not (numbers and rank == self.tp - 1):
                    continue
                for e, numbers_before in zip(edits.values(), given, strict=True):
                    e.numbers[rank] = numbers_before
            proved.setdefault(key, prover)
            prover.prove(self.model, self.args, self.kwargs)

    def _run_apart(self, edits: dict[int, CallEdit]) -> int | None:
        """A call of a module that runs several times, whose edits are not the same in all its runs."""
        runs: dict[tuple[str, Any], dict[int, list[Any]]] = {}
        for c in self.trace.calls:
            if c.module >= 0:
                runs.setdefault((self.trace.module_path(c), c.site), {}).setdefault(c.module, []).append(c)
        for by_run in runs.values():
            calls = list(by_run.values())
            longest = [edits[c.index] for c in max(calls, key=len)]
            if all(e == longest[0] for run in calls for e in (edits[c.index] for c in run)):
                continue  # however often it is reached
            if any([edits[c.index] for c in run] != longest[: len(run)] for run in calls):
                return self._most_cut([c for run in calls for c in run], edits)
        return None

    def _most_cut(self, calls: list[Any], edits: dict[int, CallEdit]) -> int:
        """Of calls that differ in their edits, the first that handles cut tensors."""
        cut = [c.index for c in calls if any(self._is_cut_call(c, t) for t in (*c.leaves, *c.outs))]
        return (cut or [calls[0].index])[0]

    def _is_cut_call(self, call: Any, x: Any) -> bool:
        return isinstance(x, Ref) and self.cut_tensors(x.tid)

    # ------------------------------------------------------------ choosing again
    def _from_rules(self, own: Ownership) -> bool:
        """Gathers and whole calls that the rules asked for; True if there was anything new."""
        if room := {t: r for t, r in own.new_room.items() if t not in self.choices.room}:
            self.choices = replace(self.choices, room={**self.choices.room, **room})
            return True
        asked = dict(own.new_gather)
        at_end = own.fed & self.trace.given_back  # put together where the model returns them
        for t in self.trace.outputs:
            if isinstance(own.states.get(t), (Owned, Disjoint)) and t not in at_end:
                asked.setdefault(t, "nothing after it needs it cut")
        returned = {p for t in self.trace.outputs if own.is_cut(t) for p in self._weights_of(own, t)}
        kept = {p: "its values are returned by the model" for p in returned if self.choices.dims.get(p, 0) is not None}
        self.notes.update(kept)
        self.choices = replace(self.choices, dims={**self.choices.dims, **dict.fromkeys(kept, None)})
        new = {}
        for tid, reason in asked.items():
            target = self._hoist(own, tid)
            target = None if target is not None and self._looked_up(own, target) else target
            if self.choices.room.get(tid) is not None:
                self.choices = replace(self.choices, room={**self.choices.room, tid: None})
                kept = {**kept, tid: reason}
            elif target is not None and target not in self.choices.gather:
                new[target] = reason
            elif own.disjoint(tid) is not None:
                self._give_up_sum(own, tid, reason)
                kept = {**kept, tid: reason}
        opaque = {c: r for c, r in own.new_opaque.items() if c not in self.choices.opaque}
        opaque = {other: r for c, r in opaque.items() for other in self.in_runs[self.place[c]]}
        self.notes.update(new)
        self._gather(new)
        self.choices = replace(self.choices, opaque=self.choices.opaque | set(opaque))
        return bool(new or opaque or kept)

    def _looked_up(self, own: Ownership, tid: int) -> bool:
        """Whether a tensor is weights that were looked up: to sum those would be to send them at every step."""
        op = self.producer.get(tid) if own.disjoint(tid) is not None else None
        call = self.trace.calls[op.call] if op is not None else None
        here = [own.experts[i] for i in range(call.start, call.stop) if i in own.experts] if call is not None else []
        return any(e.rows is None for e in here)

    def _give_up_sum(self, own: Ownership, tid: int, why: str) -> None:
        """A sum over experts that no call could make: what began it is not cut by expert."""
        ops, reached = self.trace.ops, {tid}
        weights: set[int] = set()
        for i in reversed(range(len(ops))):
            if reached.isdisjoint(ops[i].outs):
                continue
            if i in own.experts:
                weights |= self._weights_of(own, own.experts[i].weight)
            reached.update(t for t in ops[i].ins if own.disjoint(t) is not None)
        why = f"the sum over the ranks that have experts cannot be made: {why}"
        self.notes.update(dict.fromkeys(weights, why))
        self.choices = replace(self.choices, dims={**self.choices.dims, **dict.fromkeys(weights, None)})

    @staticmethod
    def _weights_of(own: Ownership, tid: int) -> frozenset[int]:
        s = own.states.get(tid)
        return s.params if isinstance(s, Weights) else frozenset()

    def _gather(self, tids: Any) -> None:
        """Gather tensors where they are computed, in every run of the module that computes them."""
        every = {t for tid in tids for t in self._in_runs(tid)}
        self.choices = replace(self.choices, gather=self.choices.gather | every)

    def _in_runs(self, tid: int) -> set[int]:
        """A call's result, and what the same place of the module's code gives in other runs of the module."""
        op = self.producer.get(tid)
        if op is None or op.call < 0:
            return {tid}
        outs = self.trace.calls[op.call].outs
        at = next((i for i, x in enumerate(outs) if isinstance(x, Ref) and x.tid == tid), None)
        if at is None:
            return {tid}
        others = [self.trace.calls[c].outs for c in self.in_runs[self.place[op.call]]]
        return {tid, *(x.tid for o in others if at < len(o) and isinstance(x := o[at], Ref))}

    def _hoist(self, own: Ownership, tid: int) -> int | None:
        """The earliest and smallest call result that can be gathered in place of ``tid``."""
        best = tid if tid in self.results else None
        while True:
            op = self.producer.get(tid)
            source = self._only_source(own, op) if op is not None else None
            if source is None or self.readers[source] != 1 or _numel(own, source) > _numel(own, tid):
                return best
            tid = source
            best = tid if tid in self.results else best

    def _only_source(self, own: Ownership, op: Op) -> int | None:
        found = rule_of(op.func)
        if op.call in own.shared:  # the cut tensor may as well be gathered before it
            return own.shared[op.call][1]
        if not (found in (movement, pointwise) or (found is None and torch_ops.is_pointwise(op.func))) or op.writes:
            return None
        ins = list(dict.fromkeys(op.ins))
        if len(ins) != 1 or (own.disjoint(ins[0]) is not None and not self._same_sum(op, ins[0])):
            return None
        return ins[0] if isinstance(own.states.get(ins[0]), (Owned, Disjoint)) else None

    def _same_sum(self, op: Op, source: int) -> bool:
        """Whether terms may as well be summed before an operation, which sends no more."""
        tensors = self.trace.tensors
        return rule_of(op.func) is movement and tensors[source].dtype == tensors[op.outs[0]].dtype

    def _alike(self, own: Ownership, call: int) -> list[int]:
        """This call and those at the same place of the same code on tensors cut alike: what fails once fails in all."""

        def kind(c: Call) -> tuple[Any, ...]:
            refs = [x.tid for x in (*c.leaves, *c.outs) if isinstance(x, Ref)]
            return c.site, c.stop - c.start, tuple((own.shape(t), isinstance(own.states.get(t), Owned)) for t in refs)

        wanted, calls = kind(self.trace.calls[call]), self.by_site[self.trace.calls[call].site]
        return [call, *(i for i in calls if i != call and kind(self.trace.calls[i]) == wanted)]

    def _give_up_tensor(self, own: Ownership, tid: int, why: str) -> None:
        target = self._hoist(own, tid)
        if target is not None and target not in self.choices.gather:
            targets = {target, *(self._hoist(own, t) for t in self._counterparts(own, tid))} - {None}
            self.notes.update({t: why for t in targets if t is not None})
            return self._gather(targets)
        op = self.producer.get(tid)
        if op is not None and op.call not in self.choices.opaque:
            return self._give_up_call(own, op.call, why)
        return self._leave_whole(own, [tid], why)

    def _counterparts(self, own: Ownership, tid: int) -> list[int]:
        """The tensors that calls like the one that made ``tid`` made in its place."""
        op = self.producer.get(tid)
        if op is None or op.call < 0:
            return []
        calls, ops = self.trace.calls, self.trace.ops
        at = next(i for i in range(calls[op.call].start, calls[op.call].stop) if ops[i] is op) - calls[op.call].start
        place = op.outs.index(tid)
        found = [ops[calls[c].start + at].outs for c in self._alike(own, op.call)]
        return [
            outs[place]
            for outs in found
            if len(outs) == len(op.outs) and isinstance(own.states.get(outs[place]), Owned)
        ]

    def _give_up_call(self, own: Ownership, call: int, why: str) -> None:
        if call in self.choices.opaque:
            return self._leave_whole(own, [x.tid for x in self.trace.calls[call].leaves if isinstance(x, Ref)], why)
        alike = self._alike(own, call)
        for x in [x for c in alike for x in self.trace.calls[c].leaves]:
            if isinstance(x, Ref):
                own.note(x.tid, why)
        self.choices = replace(self.choices, opaque=self.choices.opaque | set(alike))
        return None

    def _give_up_operands(self, own: Ownership, call: int, why: str, module: str | None = None) -> None:
        """A call that cannot be proved gets whole operands: gathered where they were computed, if they can be."""
        c = self.trace.calls[call]
        refs = [x.tid for x in c.leaves if isinstance(x, Ref)]
        owned = [t for t in refs if isinstance(own.states.get(t), Owned)]
        if not owned:
            owned = [x.tid for x in c.outs if isinstance(x, Ref) and isinstance(own.states.get(x.tid), Owned)]
        targets = {self._hoist(own, t) for t in owned} - {None} - self.choices.gather
        if targets:
            every = {t for o in owned for t in self._same_places(own, call, o)}
            targets |= {self._hoist(own, t) for t in every} - {None} - self.choices.gather
            self.notes.update({t: why for t in targets if t is not None})
            return self._gather(targets)
        if call not in self.choices.opaque and any(own.owners(t) is not None for t in refs):
            return self._give_up_call(own, call, why)
        return self._leave_whole(own, self._nearby(call, module), why)

    def _same_places(self, own: Ownership, call: int, tid: int) -> list[int]:
        """The tensors that calls like this one get, or give, in the place of ``tid``."""
        edges = [(*self.trace.calls[c].leaves, *self.trace.calls[c].outs) for c in self._alike(own, call)]
        places = [i for i, x in enumerate(edges[0]) if isinstance(x, Ref) and x.tid == tid]
        return [x.tid for edge in edges for i in places if isinstance(x := edge[i], Ref)]

    def _nearby(self, call: int, module: str | None) -> list[int]:
        """The parameters of the module whose code failed, then tensors of the calls before and after it."""
        calls = [*reversed(self.trace.calls[: call + 1]), *self.trace.calls[call + 1 :]]
        mine = [t for name, t in self.trace.leaves.items() if name.rpartition(".")[0] == module]
        return mine + [x.tid for c in calls for x in (*c.leaves, *c.outs) if isinstance(x, Ref)]

    def _leave_whole(self, own: Ownership, tids: list[int], why: str) -> None:
        """The last choice: parameters that reach here are not cut at all."""
        for tid in tids:
            params = self._params(own, tid)
            open_ = [p for p in params if p in own.cut and self.choices.dims.get(p, 0) is not None]
            if open_:
                for p in open_:
                    self.notes[p] = why
                dims = {**self.choices.dims, **dict.fromkeys(open_, None)}
                self.choices = replace(self.choices, dims=dims)
                return
        raise ProofError(f"no program could be proved: {why}")

    def _params(self, own: Ownership, tid: int) -> list[int]:
        s = own.states.get(tid)
        if isinstance(s, Weights):
            return sorted(s.params)
        if isinstance(s, Owned):
            groups = set(own.nodes.distinct(s.owners).tolist())
            return [
                p for (p, d), base in own.base.items()
                if own.cut.get(p) == d and groups & set(own.nodes.find(_span(base, own.shape(p)[d])).tolist())
            ]  # fmt: skip
        return []


def _span(base: int, n: int) -> Any:
    return np.arange(base, base + n)


def _numel(own: Ownership, tid: int) -> int:
    n = 1
    for s in own.shape(tid):
        n *= s
    return n
