"""The difference between the user's program and a rank's program, as edits.

An edit sits at a call (one torch function in the user's code) or, hoisted, at a module's edge. Operands are entered,
sliced, gathered or contributed once; results are summed or gathered; integers that count what is cut are scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from autotp import torch_hooks, torch_ops
from autotp.call_edits import (
    CallEdit,
    CannotEdit,
    Cuts,
    ExpertsEdit,
    Indices,
    NumberEdit,
    OperandEdit,
    ResultEdit,
    SharedEdit,
)
from autotp.ownership.dealing import Dealing, Sets, Tokens, indices
from autotp.ownership.engine import Ownership
from autotp.ownership.rules_movement import IDENTITY
from autotp.ownership.state import Want
from autotp.record import Call, Op
from autotp.trees import Ref


class Lowering:
    """From owners and wants (aten level) to edits of calls."""

    def __init__(self, own: Ownership, dealing: Dealing) -> None:
        self.own, self.dealing, self.trace = own, dealing, own.trace
        self.written = {self.trace.tensors[t].storage for op in self.trace.ops for t in op.writes}
        writes = ((self.trace.tensors[t].storage, i) for i, op in enumerate(self.trace.ops) for t in op.writes)
        self.last_write = dict(writes)  # of every storage the last operation that writes into it
        self.used = {t for op in self.trace.ops for t in op.ins}  # torch makes views that it then does not need
        self.used |= {x.tid for c in self.trace.calls for x in c.outs if isinstance(x, Ref)}
        self.producer = {t: i for i, op in enumerate(self.trace.ops) for t in op.outs if t >= 0 and t not in op.writes}

    @torch_hooks.unwatched
    def edits(self) -> dict[int, CallEdit]:
        """The edits of every call, before numbers are solved for."""
        return {c.index: self.call_edit(c) for c in self.trace.calls}

    def call_edit(self, call: Call) -> CallEdit:
        edit = CallEdit()
        leaf_of: dict[int, list[int]] = {}
        for i, x in enumerate(call.leaves):
            if isinstance(x, Ref):
                leaf_of.setdefault(x.tid, []).append(i)
        found: dict[int, set[OperandEdit]] = {}
        settled: set[int] = set()
        for i in range(call.start, call.stop):
            for want in self.own.wants[i]:
                chain: list[int] = []
                tid, conversion = self._convert(i, want, call, chain)
                if conversion:
                    found.setdefault(tid, set()).add(conversion)
                    settled.update([i, *chain])
        for tid, conversions in found.items():
            if tid not in leaf_of:
                raise CannotEdit(call.index, f"{call.name} reads a tensor that is not among its arguments")
            shared = call.index in self.own.shared  # replaced as a whole
            if len(conversions) > 1 or (not shared and self._used_otherwise(tid, call, settled)):
                raise CannotEdit(call.index, f"{call.name} needs one operand in two ways")
            for leaf in leaf_of[tid]:
                edit.operands[leaf] = next(iter(conversions))
        self._results(call, edit)
        self._tokens(call, edit)
        self._check_aliases(call, edit)
        if call.fixed and (edit.results or not all(self._at_edge(call, i, e) for i, e in edit.operands.items())):
            raise CannotEdit(call.index, f"{call.name} is a custom autograd function, which no mode can edit")
        edit.rows = self._rows(call)
        edit.shared = self._shared(call)
        edit.experts = self._experts(call)
        edit.random = self._random(call)
        edit.noise = self._noise(call) if edit.random and edit.stream is None else ()
        if call.module < 0 and edit:
            raise CannotEdit(call.index, f"{call.name} is called outside of the model")
        return edit

    def _at_edge(self, call: Call, leaf: int, edit: OperandEdit) -> bool:
        """Whether an operand can be edited where its module begins: a parameter of it that is read here only."""
        tid, home = call.leaves[leaf].tid, self.trace.module_path(call)
        at = {(self.trace.module_path(c), c.site) for c in self.trace.calls if Ref(tid) in c.leaves}
        homes = {name.rpartition(".")[0] for name, t in self.trace.leaves.items() if t == tid}
        return edit == OperandEdit(enter=True) and home in homes and at == {(home, call.site)}

    def _used_otherwise(self, tid: int, call: Call, settled: set[int]) -> bool:
        """Whether some operation of the call reads a converted operand without asking for that conversion."""
        ops = self.trace.ops
        return any(
            tid in ops[i].ins
            and i not in settled
            and any(t in self.used and self.trace.tensors[t].grad for t in ops[i].outs)
            for i in range(call.start, call.stop)
        )

    # ------------------------------------------------------------ operands
    def _convert(self, i: int, want: Want, call: Call, chain: list[int]) -> tuple[int, OperandEdit]:
        """The conversion one operation needs, moved back to an operand of the call."""
        op, have = self.trace.ops[i], self._have(want.tid, call)
        wanted = self._wanted(want, call)
        grad = self.trace.tensors[want.tid].grad
        summed = want.kind == "as" and self.own.disjoint(want.tid) is not None
        cut_out = any(t >= 0 and (self._partial(t, call) or self._have(t, call)) for t in op.outs)
        if want.kind == "own":
            enter = not have and cut_out and grad and not self._partial(want.tid, call)
            edit = OperandEdit(enter=enter)
        elif want.kind == "once":
            edit = OperandEdit(gather=_cuts(have), once=True)
        elif have == wanted:
            edit = OperandEdit(enter=not have and cut_out and grad, sum=summed)
        else:
            missing = {d: s for d, s in wanted.items() if have.get(d) != s}
            extra = {d: s for d, s in have.items() if wanted.get(d) != s}
            edit = OperandEdit(gather=_cuts(extra), enter=cut_out and grad, slice=_cuts(missing), sum=summed)
            if (missing or extra) and set(have) - set(extra):  # of tiles, one dim cannot be joined and another kept
                raise CannotEdit(call.index, f"{op.func} needs an operand cut in another way")
        return self._back(want.tid, edit, call, chain) if edit else (want.tid, edit)

    def _have(self, tid: int, call: Call) -> Sets:
        """How a tensor is cut within a call: before it is gathered or scattered, if it is computed there."""
        if self.own.made_in.get(tid) != call.index:
            return self.dealing.sets(tid)
        if tid in self.own.scattered:
            return {}
        gathered = self.own.gathered.get(tid)
        return self.dealing.sets(tid) if gathered is None else self.dealing.of_owners(gathered, tid)

    def _partial(self, tid: int, call: Call) -> bool:
        if self.own.disjoint(tid) is not None:
            return True
        here = self.own.made_in.get(tid) == call.index or tid in self.own.choices.later
        return here and tid in self.own.was_partial

    def _wanted(self, want: Want, call: Call) -> Sets:
        out: Sets = {}
        for d, like in want.dims:
            if isinstance(like, tuple):
                other = self._have(like[0], call)
                if like[1] in other:
                    out[d] = other[like[1]]
            else:
                s = self.dealing.of_nodes(like)
                if sum(map(len, s)) and any(len(x) < self.own.shape(want.tid)[d] for x in s):
                    out[d] = s
        return out

    def _back(self, tid: int, edit: OperandEdit, call: Call, chain: list[int]) -> tuple[int, OperandEdit]:
        """Follow a tensor made inside the call back to the operand it was made from."""
        while True:
            at = self.producer.get(tid)
            if at is None or at < call.start:
                return tid, edit
            chain.append(at)
            op = self.trace.ops[at]
            sources = [t for t in dict.fromkeys(op.ins) if self.trace.tensors[t].grad]
            sources = sources or list(dict.fromkeys(op.ins))
            if len(sources) != 1:
                raise CannotEdit(call.index, f"{call.name} combines operands before it needs them cut")
            if edit.slice or edit.gather:
                edit = self._through(op, sources[0], tid, edit, call)
            tid = sources[0]

    def _through(self, op: Op, source: int, tid: int, edit: OperandEdit, call: Call) -> OperandEdit:
        """A slice or gather of a result as one of the operand it was computed from."""
        if edit.gather:
            if edit.slice:
                raise CannotEdit(call.index, f"{call.name} needs an inner tensor cut in another way")
            return replace(edit, gather=_cuts(self._have(source, call)))
        from autotp.ownership.rules_movement import moved

        name = op.func.overloadpacket.__name__
        shape, out_shape = self.own.shape(source), self.own.shape(tid)
        if torch_ops.is_pointwise(op.func) or name in IDENTITY or (shape == out_shape and name in _SAME):
            if shape == out_shape:
                return edit
            raise CannotEdit(call.index, f"{call.name} broadcasts an operand before it is cut")
        import torch

        tags = torch.arange(max(1, _numel(shape))).view(shape)
        try:
            out = moved(op, source, tags, [out_shape] * len(op.outs))[op.outs.index(tid)]
        except Exception as e:
            raise CannotEdit(call.index, f"{call.name}: {op.func} stands between an operand and its cut") from e
        return replace(edit, slice=self._as_tokens(self._slices_of(out, edit.slice, shape, call), edit.slice))

    @staticmethod
    def _as_tokens(cuts: Cuts, before: Cuts) -> Cuts:
        """Slices moved to another dim are still slices of tokens if they are the same ones."""
        known = {tuple(s): s for _, s in before}
        return tuple((d, known.get(tuple(s), s)) for d, s in cuts)

    def _slices_of(self, tags: Any, cuts: Cuts, shape: tuple[int, ...], call: Call) -> Cuts:
        import numpy as np

        dims: dict[int, list[Sequence[int]]] = {d: [] for d in range(len(shape))}
        for r in range(self.dealing.tp):
            mine = tags
            for d, per_rank in cuts:
                mine = mine.index_select(d, _index(per_rank[r]))
            seen = np.zeros(shape, dtype=bool)
            seen.reshape(-1)[mine.numpy()] = True
            axes = [np.flatnonzero(seen.any(axis=tuple(o for o in dims if o != d))) for d in dims]
            if seen.sum() != np.prod([len(a) for a in axes]):
                raise CannotEdit(call.index, f"{call.name} would need scattered elements of an operand")
            for d, a in enumerate(axes):
                dims[d].append(indices(a))
        return _cuts({d: tuple(s) for d, s in dims.items() if any(len(x) < shape[d] for x in s)})

    # ------------------------------------------------------------ results
    def _results(self, call: Call, edit: CallEdit) -> None:
        for i, x in enumerate(call.outs):
            if not isinstance(x, Ref) or self.own.made_in.get(x.tid) != call.index:
                continue  # a call may return its operand as it is
            kept = self.own.scattered.get(x.tid)
            scatter = () if kept is None else _cuts(self.dealing.of_owners(kept, x.tid))
            if x.tid in self.own.leave:
                edit.results[i] = ResultEdit(leave=True, scale=self._scale(self.own.leave[x.tid]), scatter=scatter)
            elif scatter:
                edit.results[i] = ResultEdit(scatter=scatter)
            elif x.tid in self.own.gathered:
                sets = self.dealing.of_owners(self.own.gathered[x.tid], x.tid)
                edit.results[i] = ResultEdit(gather=_cuts(sets))

    def _tokens(self, call: Call, edit: CallEdit) -> None:
        """Say of a call and its edits which stream's tokens they depend on; there can be one only, and nothing else."""
        if not self.own.streams.first:
            return
        made = sorted({t for i in range(call.start, call.stop) for t in self.trace.ops[i].outs if t >= 0})
        owners = [self._owners(t, call) for t in made if self._have(t, call)]
        streams = {self.own.streams.of(o) for o in owners if o is not None}
        if len(streams) > 1:
            raise CannotEdit(call.index, f"{call.name} works on tensors that are cut by tokens and in another way")
        edit.stream = streams.pop() if streams else None
        if edit.stream is not None:
            edit.operands = {i: replace(e, stream=edit.stream) for i, e in edit.operands.items()}
        cuts = [s for e in edit.operands.values() for _, s in (e.slice if edit.stream is not None else ())]
        for i, e in edit.operands.items():
            owner = self.own.owners(call.leaves[i].tid)
            cuts += [s for _, s in e.gather] if self.own.by_tokens(owner) else []
        cuts += [s for r in edit.results.values() for _, s in (*r.scatter, *(r.gather if edit.stream else ()))]
        if not all(isinstance(s, Tokens) for s in cuts):
            raise CannotEdit(call.index, f"{call.name} needs tokens that were joined with another dim")

    def _owners(self, tid: int, call: Call) -> Any:
        made_here = self.own.made_in.get(tid) == call.index
        return self.own.gathered.get(tid) if made_here and tid in self.own.gathered else self.own.owners(tid)

    def _check_aliases(self, call: Call, edit: CallEdit) -> None:
        """An edit makes a new tensor; where a write should have reached the old one, it must not be made."""
        tensors = self.trace.tensors
        changed = {
            tensors[call.leaves[i].tid].storage for i, e in edit.operands.items() if e.gather or e.slice or e.once
        }
        made = {tensors[x.tid].storage for x in call.outs if isinstance(x, Ref)}
        ins = {t for i in range(call.start, call.stop) for t in self.trace.ops[i].ins}
        views = {tensors[t].storage for t in ins if self.own.made_in.get(t) != call.index} & made
        storage = {i: tensors[call.outs[i].tid].storage for i in edit.results}
        sums = {i for i, r in edit.results.items() if r.leave and self.last_write.get(storage[i], -1) < call.stop}
        edited = {s for i, s in storage.items() if i not in sums}  # a sum of what no write comes after is a value
        if ((changed & made) | (edited & views)) & self.written:
            raise CannotEdit(call.index, f"{call.name} gives a view that is written into")

    def _scale(self, mean_of: int) -> tuple[float, ...]:
        if mean_of < 0:
            return ()
        sets, shape = self.dealing.sets(mean_of), self.own.shape(mean_of)
        out = []
        for r in range(self.dealing.tp):
            f = Fraction(1)
            for d, s in sets.items():
                f *= Fraction(len(s[r]), shape[d])
            out.append(float(f))
        return tuple(out)

    def _rows(self, call: Call) -> Indices | None:
        for i in range(call.start, call.stop):
            if i in self.own.vocab:
                if call.stop - call.start != 1 or call.name != "embedding":
                    raise CannotEdit(call.index, f"{call.name} looks up rows inside")
                return self.dealing.sets(self.trace.ops[i].args[0].tid)[0]
        return None

    def _experts(self, call: Call) -> ExpertsEdit | None:
        here = [i for i in range(call.start, call.stop) if i in self.own.experts]
        if not here:
            return None
        leaf = {x.tid: i for i, x in enumerate(call.leaves) if isinstance(x, Ref)}
        others = [self.trace.ops[i] for i in range(call.start, call.stop) if i not in here]
        for op in others:
            if len(op.ins) == 1 and op.ins[0] in leaf:
                leaf.setdefault(op.outs[0], leaf[op.ins[0]])
        of = self.own.experts[here[0]]
        tensors = [t for t in (of.weight, of.index, of.rows) if t is not None]
        picked = self.trace.ops[here[0]].args[-1]
        numbers = [i for i, x in enumerate(call.leaves) if type(x) is int and x == picked and of.index is None]
        casts = all(op.func.overloadpacket.__name__ in (*IDENTITY, "_local_scalar_dense") for op in others)
        known = all(t in leaf for t in tensors) and (of.index is not None or len(numbers) == 1)
        if len(here) > 1 or not casts or not known:
            raise CannotEdit(call.index, f"{call.name} does more with experts than one product or look-up")
        rows = leaf[of.rows] if of.rows is not None else None
        index = leaf[of.index] if of.index is not None else numbers[0]
        return ExpertsEdit(leaf[of.weight], index, rows, self.dealing.sets(of.weight)[0])

    def _shared(self, call: Call) -> SharedEdit | None:
        if call.index not in self.own.shared:
            return None
        what, x = self.own.shared[call.index]
        return SharedEdit(what, self.dealing.sets(x)[what.cut])

    def _random(self, call: Call) -> bool:
        if not self.trace.draws:
            return False
        outs = [x.tid for x in call.outs if isinstance(x, Ref)]
        inside = [t for i in range(call.start, call.stop) for t in self.trace.ops[i].outs if t >= 0]
        drawn = torch_hooks.may_be_random(call.func) or any(
            torch_ops.is_random(self.trace.ops[i].func) for i in range(call.start, call.stop)
        )
        return drawn and any(self._have(t, call) for t in [*outs, *inside])

    def _noise(self, call: Call) -> Cuts:
        """How what it draws is cut, if that depends on nothing but a shape."""
        if call.func not in torch_hooks.NOISE or not isinstance(call.outs[0], Ref):
            return ()
        return _cuts(self._have(call.outs[0].tid, call))


_SAME = {"_softmax", "_log_softmax", "dropout", "native_dropout"}


def _cuts(sets: Sets) -> Cuts:
    return tuple(sorted(sets.items()))


def _index(chosen: Sequence[int]) -> Any:
    import torch

    return torch.tensor(chosen, dtype=torch.int64)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


__all__ = ["CallEdit", "CannotEdit", "Lowering", "NumberEdit", "OperandEdit", "ResultEdit", "SharedEdit"]
