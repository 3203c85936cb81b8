"""Sequence parallelism: between the cut layers, every rank works on some of the tokens only.

It is the ownership analysis once more, with nodes for token positions (:mod:`autotp.ownership.streams`). A sum over
the ranks is the place to start: instead of all of it, each rank keeps its tokens. The rules carry that on through
norms, dropouts and residual adds; what mixes tokens, or meets cut weights, asks for whole tensors, and they are
gathered there. Both programs are proved: the one with cut tokens, and the one for calls with too few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autotp import torch_hooks, torch_ops
from autotp.analysis import Force, analyse
from autotp.call_edits import CallEdit, OperandEdit, ResultEdit
from autotp.ownership import rules_linear, rules_norm
from autotp.ownership.choices import Choices
from autotp.ownership.dealing import Dealing, Tokens
from autotp.ownership.engine import Ownership
from autotp.ownership.registry import find_rule, rule_of
from autotp.ownership.rules_movement import movement
from autotp.ownership.rules_pointwise import pointwise
from autotp.ownership.state import Owned, Weights
from autotp.record import Call, Op, Trace
from autotp.search import Analysis, Search
from autotp.trace import trace
from autotp.trees import Ref


def unfolded(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], force: Force | None, found: Analysis
) -> Analysis:
    """The same analysis of a record in which every block ran: streams run through all of them."""
    if not found.trace.skipped:
        return found
    full = trace(model, args, kwargs, fold=False, drive=found.trace.drive)
    return analyse(model, args, kwargs, found.dealing.tp, force, full)


def cut_tokens(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Analysis
) -> tuple[Analysis, tuple[str, ...]]:
    """Cut the tokens between the cut layers of a proved program, and say where that could not be done."""
    tp = found.dealing.tp
    choices = replace(found.own.choices, later=_later(found))
    own = Ownership(found.trace, tp, choices).run() if choices.later else found.own
    dims = token_dims(own)
    shapes = {t: found.trace.tensors[t].shape[d] for t, d in dims.items()}
    short = {n for n in shapes.values() if n < tp}
    told = (f"the sample has {min(short)} tokens, too few to cut over {tp} ranks: pass a longer one",) if short else ()
    long = {t: d for t, d in dims.items() if shapes[t] >= tp}
    if not long:
        return found, told or ("no tokens can be cut: there is no dim of positions between the cut layers",)
    search = TokenSearch(model, args, kwargs, found.trace, tp, replace(choices, tokens=long), dict(found.notes))
    made = replace(search.run(), chosen=found.chosen)
    if made.own.scattered:
        return made, told
    why = next(reversed(search.given_up.values()), "whatever follows needs all of them")
    return found, (*told, f"no tokens could be cut: {why}")


def _later(found: Analysis) -> frozenset[int]:
    """Sums over the ranks of matrices whose rows then become batch and tokens: they are made once there are tokens."""
    trace, readers = found.trace, _readers(found.trace)
    written = {trace.tensors[t].storage for op in trace.ops for t in op.writes}
    out: set[int] = set()
    for t in found.own.leave:
        passed = []
        while len(trace.tensors[t].shape) < 3 and trace.tensors[t].storage not in written:
            calls = readers.get(t, [])
            if len(calls) != 1 or t in trace.outputs or not _only_moves(trace, calls[0][0]):
                break
            made = [x.tid for x in calls[0][0].outs if isinstance(x, Ref)]
            if len(made) != 1 or sum(isinstance(x, Ref) for x in calls[0][0].leaves) != 1:
                break
            passed.append(t)
            t = made[0]
        if len(trace.tensors[t].shape) > 2:
            out.update(passed)
    return frozenset(out)


def token_dims(done: Ownership) -> dict[int, int]:
    """For every sum over the ranks the dim of its token positions: the one that attention mixes further on.

    Else the one that meets tokens which are known already; where nothing mixes any dim, the one beside the features,
    unless weights are multiplied along it.
    """
    dims: dict[int, int] = {}
    for t in done.leave:
        shape, beside = done.shape(t), len(done.shape(t)) - 2
        if t in dims:
            continue
        ways = {d: _followed(done, dims, t, d) for d in range(len(shape) - 1) if shape[d] > 1}
        for sign in ("products", "known"):
            found = next((places for places, signs in ways.values() if sign in signs), None)
            if found is not None:
                break
        else:
            found = ways[beside][0] if beside in ways and "weights" not in ways[beside][1] else {}
        dims = {**found, **dims}
    return dims


def _followed(done: Ownership, known: dict[int, int], tid: int, dim: int) -> tuple[dict[int, int], set[str]]:
    """Where a dim of a sum is in the other sums, followed through the model, and what it met."""
    trace = done.trace
    whole: dict[int, int | None] = dict.fromkeys(set(trace.leaves.values()), None)
    own = Ownership(trace, done.tp, Choices(whole, opaque=done.choices.opaque, tokens={**known, tid: dim})).run()
    streams = {t: own.streams.of(o) for t, o in own.scattered.items()}
    owners = {t: own.owners(t) for t in done.leave}
    mine = [t for t, o in owners.items() if o is not None and own.streams.of(o) == streams.get(tid)]
    refused = [at for node, at in own.streams.refused if own.streams.root(node) == streams.get(tid)]
    signs = {_kind(own, trace.ops[at]) for at in refused}
    if any(t != tid and of == streams.get(tid) for t, of in streams.items()):
        signs.add("known")
    places = {t: own.streams.dim(own.owners(t)) for t in mine}  # type: ignore[arg-type]
    return {t: d for t, d in places.items() if d is not None}, signs


def _kind(own: Ownership, op: Op) -> str:
    """What would have mixed tokens: weights (then they are features), a product of activations, or something else."""
    rule = find_rule(op)
    weights = any(isinstance(own.states.get(t), Weights) for t in op.ins)
    linear = rule.__module__ == rules_linear.__name__ and rule is not rules_linear.convolution
    if rule is rules_norm.layer_norm or (linear and weights):
        return "weights"
    return "products" if linear else "others"


@dataclass
class TokenSearch(Search):
    """The search for a program, once more, with tokens cut. Whatever fails is put down to that: more is gathered."""

    given_up: dict[int, str] = field(default_factory=dict)

    def run(self) -> Analysis:
        """Search, then gather early what is only moved and scaled before it is gathered."""
        made = super().run()
        while early := Spent(self.trace, made.own).found():
            self.given_up.update(dict.fromkeys(early, "nothing works on a part of the tokens before they are gathered"))
            self._gather(early)
            made = super().run()
        return made

    def _edits(self, own: Ownership, dealing: Dealing) -> dict[int, CallEdit]:
        edits = super()._edits(own, dealing)
        joined = summed(self.trace, edits)
        return edits if self._run_apart(joined) is not None and self._run_apart(edits) is None else joined

    def _prove(self, dealing: Dealing, edits: dict[int, CallEdit]) -> None:
        """With tokens whole first: numbers that are wrong there too do not count tokens."""
        super()._prove(Dealing(dealing.own, uncut=True), {c: uncut(e) for c, e in edits.items()})
        super()._prove(dealing, edits)

    # ------------------------------------------------------------ choosing again
    def _from_rules(self, own: Ownership) -> bool:
        asked = {t: why for t, why in own.new_gather.items() if own.by_tokens(own.owners(t))}
        asked |= {t: "is returned" for t in self.trace.outputs if own.by_tokens(own.owners(t))}
        if asked:
            self._make_whole(own, list(asked), next(iter(asked.values())))
            return True
        return super()._from_rules(own)

    def _give_up_tensor(self, own: Ownership, tid: int, why: str) -> None:
        self._make_whole(own, [tid], why)

    def _give_up_call(self, own: Ownership, call: int, why: str) -> None:
        self._give_up_operands(own, call, why)

    def _give_up_operands(self, own: Ownership, call: int, why: str, module: str | None = None) -> None:
        """Gather what the call reads, else what it makes, else what the module gets, else what is nearest."""
        c = self.trace.calls[call]
        alike = [x for x in self.trace.calls if x.site == c.site and self._path(x) == self._path(c)]
        groups = [[y.tid for x in alike for y in xs(x) if isinstance(y, Ref)] for xs in (_leaves, _outs)]
        groups.append([t for m in self.trace.modules if m.path == module for t in m.inputs.values()])
        groups += [[t] for t in self._nearby(call, module)]
        for tids in groups:
            cut = [t for t in tids if own.by_tokens(own.owners(t))]
            if cut:
                return self._make_whole(own, cut, why)
        return self._stop(own, list(own.scattered), why)

    def _path(self, call: Call) -> str:
        return self.trace.module_path(call) if call.module >= 0 else ""

    def _make_whole(self, own: Ownership, tids: list[int], why: str) -> None:
        """Gather where these come from; where that cannot be, their tokens are not cut at all."""
        targets = {t for tid in tids for t in self._sources(own, tid)} - self.choices.gather
        if not targets:
            return self._stop(own, tids, why)
        self.given_up.update(dict.fromkeys(targets, why))
        return self._gather(targets)

    def _stop(self, own: Ownership, tids: list[int], why: str) -> None:
        owners = [o for o in map(own.owners, tids) if o is not None]
        streams = {own.streams.of(o) for o in owners} - {None}
        dropped = {t for t, o in own.scattered.items() if not streams or own.streams.of(o) in streams}
        self.given_up.update(dict.fromkeys(dropped, why))
        self.choices = replace(self.choices, tokens={t: d for t, d in self.choices.tokens.items() if t not in dropped})

    def _sources(self, own: Ownership, tid: int) -> set[int]:
        """The call results with tokens in a dim of their own, nothing else, that a tensor is made from."""
        o = own.owners(tid)
        if not own.by_tokens(o):
            return set()
        op = self.producer.get(tid)
        source = op.ins[0] if op is not None and rule_of(op.func) is movement else None
        if source is not None and self.readers[source] == 1 and self._is_source(own, source):
            return self._sources(own, source)
        if self._is_source(own, tid):
            return {tid}
        return {t for i in dict.fromkeys(op.ins if op is not None else ()) for t in self._sources(own, i)}

    def _is_source(self, own: Ownership, tid: int) -> bool:
        o = own.owners(tid)
        return tid in self.results and isinstance(own.states.get(tid), Owned) and own.streams.dim(o) is not None  # type: ignore[arg-type]


@dataclass
class Spent:
    """Finds tokens that are cut for nothing: all that happens to them could as well be done by all ranks.

    Nothing is added to them, normed or dropped before they are gathered again, possibly in several places.
    """

    trace: Trace
    own: Ownership
    known: dict[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.readers = _readers(self.trace)

    def found(self) -> set[int]:
        """Such tensors, each the earliest of its line."""
        early: set[int] = set()
        for c in self.trace.calls:
            for x in c.outs:
                if not isinstance(x, Ref) or x.tid in self.own.gathered or not self._is_source(x.tid):
                    continue
                gathers = self.gathers(x.tid)
                if gathers and (x.tid in self.own.scattered or gathers > 1):
                    early.add(x.tid)
        return early & set(self.own.scattered) or early

    def _is_source(self, tid: int) -> bool:
        o = self.own.owners(tid)
        return o is not None and self.own.by_tokens(o) and self.own.streams.dim(o) is not None

    def gathers(self, tid: int) -> int | None:
        """In how many places a tensor is gathered in the end; None if anything else happens to it."""
        if tid not in self.known:
            self.known[tid] = None
            self.known[tid] = self._gathers(tid)
        return self.known[tid]

    def _gathers(self, tid: int) -> int | None:
        if tid in self.own.gathered:
            return 1
        if tid in self.trace.outputs:
            return None
        total = 0
        for call, _ in self.readers.get(tid, []):
            outs = [x.tid for x in call.outs if isinstance(x, Ref)]
            below = [self.gathers(o) for o in outs if o != tid]
            if not self._is_thin(call, tid) or None in below:
                return None
            total += sum(n for n in below if n is not None)
        return total

    def _is_thin(self, call: Call, tid: int) -> bool:
        """Whether a call only moves or scales the elements of one tensor."""
        ops = self.trace.ops[call.start : call.stop]
        tensors, own = self.trace.tensors, {t for op in ops for t in op.outs}
        others = {t for op in ops for t in op.ins if tensors[t].grad and t not in own} - {tid}
        rules = [find_rule(op) for op in ops if any(tensors[t].grad for t in op.ins)]
        draws = any(torch_ops.is_random(op.func) for op in ops) or torch_hooks.may_be_random(call.func)
        return not others and not draws and all(rule in (movement, pointwise) for rule in rules)


def _leaves(call: Call) -> list[Any]:
    return call.leaves


def _outs(call: Call) -> list[Any]:
    return call.outs


def uncut(edit: CallEdit) -> CallEdit:
    """An edit in a call of the model in which no tokens are cut; numbers found for it count for both."""
    operands = {
        i: replace(e, gather=tuple(c for c in e.gather if not isinstance(c[1], Tokens)))
        for i, e in edit.operands.items()
        if e.stream is None
    }
    results = {
        i: ResultEdit(leave=r.leave, scale=r.scale, gather=tuple(c for c in r.gather if not isinstance(c[1], Tokens)))
        for i, r in edit.results.items()
    }
    return replace(
        edit,
        operands={i: e for i, e in operands.items() if e},
        results={i: r for i, r in results.items() if r.leave or r.gather},
        stream=None,
    )


# ---------------------------------------------------------------- one collective instead of two


def summed(trace: Trace, edits: dict[int, CallEdit]) -> dict[int, CallEdit]:
    """Where all readers of gathered tokens enter them, gradients are summed into the parts, and no reader enters.

    (Unless the tokens are not cut in a call: then there is nothing to gather, and readers enter as ever.)
    """
    readers = _readers(trace)
    out = {c: replace(e, operands=dict(e.operands), results=dict(e.results)) for c, e in edits.items()}
    for c, edit in edits.items():
        for i, r in edit.results.items():
            if not r.gather or not all(isinstance(s, Tokens) for _, s in r.gather):
                continue
            entered = _entered(trace, edits, readers, trace.calls[c].outs[i].tid)
            if entered:
                out[c].results[i] = replace(r, summed=True)
                for call, leaf in entered:
                    before = edits[call].operands[leaf]
                    kept = before.stream is None
                    out[call].operands[leaf] = replace(before, enter=kept, unless=edit.stream if kept else None)
    for e in out.values():
        e.operands = {i: o for i, o in e.operands.items() if o}
    return out


def _readers(trace: Trace) -> dict[int, list[tuple[Call, int]]]:
    found: dict[int, list[tuple[Call, int]]] = {}
    for c in trace.calls:
        for i, x in enumerate(c.leaves):
            if isinstance(x, Ref):
                found.setdefault(x.tid, []).append((c, i))
    return found


def _entered(
    trace: Trace, edits: dict[int, CallEdit], readers: dict[int, list[tuple[Call, int]]], tid: int
) -> set[tuple[int, int]]:
    """Where a whole tensor is entered, if all of its readers do so, themselves or after moving its elements."""
    written = {trace.tensors[t].storage for op in trace.ops for t in op.writes}

    def walk(t: int) -> Iterator[tuple[int, int] | None]:
        if t in trace.outputs or trace.tensors[t].storage in written:
            yield None
        for call, leaf in readers.get(t, []):
            edit = edits[call.index].operands.get(leaf, OperandEdit())
            outs = [x.tid for x in call.outs if isinstance(x, Ref) and x.tid != t and trace.tensors[x.tid].grad]
            if edit.enter and not edit.gather:
                yield call.index, leaf
            elif not edit and _only_moves(trace, call) and not edits[call.index].results:
                for o in outs:
                    yield from walk(o)
            elif outs:
                yield None

    found = list(walk(tid))
    return set() if None in found else {x for x in found if x is not None}


def _only_moves(trace: Trace, call: Call) -> bool:
    ops = trace.ops[call.start : call.stop]
    return bool(ops) and all(rule_of(op.func) is movement for op in ops)
