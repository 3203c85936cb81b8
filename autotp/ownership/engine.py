"""Carry owners through a recorded run, operation by operation.

A rule (see the ``rules_*`` files) says for one operation which owners merge, what it needs of its operands
(:class:`Want`) and who owns its result. An operation without a rule needs everything whole. So the analysis is sound
by default: the worst outcome is that something is gathered.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotp import torch_hooks
from autotp.errors import RuleError
from autotp.ownership.choices import Choices, Experts, Room
from autotp.ownership.nodes import Nodes, along, compress, core, pairs, varies
from autotp.ownership.registry import CALL_RULES, RULES, find_rule, kept_whole, no_rule
from autotp.ownership.state import Count, Disjoint, Owned, State, Vec, Want, Weights
from autotp.ownership.streams import Streams
from autotp.record import Op, Trace

FIRST_NODE = 1  # where a layout is given: of those that stand for what each rank has of things computed before


class Ownership:
    """The state of one pass. Rules read and write it through the methods below."""

    def __init__(self, trace: Trace, tp: int, choices: Choices) -> None:
        self.trace, self.tp, self.choices = trace, tp, choices
        self.nodes = Nodes()
        self.streams = Streams(self.nodes)
        self.scattered: dict[int, Tensor] = {}  # whole results of which ranks keep some tokens -> their owners
        self.states: dict[int, State] = {}
        self.wants: list[list[Want]] = [[] for _ in trace.ops]
        self.cut: dict[int, int] = {}
        self.partial: dict[int, int] = {}  # tensor -> the tensor a mean was taken of, or -1 for a sum
        self.was_partial: set[int] = set()
        self.scaled: dict[int, tuple[Count, ...]] = {}  # call -> integers that count groups, to be scaled with them
        self.vocab: set[int] = set()
        self.shared: dict[int, tuple[Any, int]] = {}  # call -> what the ranks do together there, and with which tensor
        self.classed: list[tuple[str, np.ndarray]] = []  # losses over cut classes, and the groups of these
        self.fed: set[int] = set()  # cut tensors that such losses are made from
        self.leave: dict[int, int] = {}
        self.gathered: dict[int, Tensor] = {}
        self.new_gather: dict[int, str] = {}
        self.new_opaque: dict[int, str] = {}
        self.reasons: dict[int, list[str]] = {}
        self.roles: dict[int, dict[int, str]] = {}  # parameter -> dim -> out | in | batch | rows | features
        self.split_input: set[int] = set()
        self.attended: list[np.ndarray] = []  # groups that a product of two activations joined: attention heads
        self.experts: dict[int, Experts] = {}  # operation -> which rows of it a rank computes
        self.by_expert: set[int] = set()  # the parameters of which each rank has some experts
        self.picked: dict[int, int] = {}  # parameters that are looked up by index -> along which dim
        self.numbers: dict[Any, Tensor] = {}  # what tells rows apart -> their numbers, and (below) whose they are
        self.experts_of: dict[Any, Tensor] = {}
        self.tried: list[tuple[str, np.ndarray]] = []  # operations cut as trials allow, and the groups of their results
        self.base: dict[tuple[int, int], int] = {}
        self.new_room: dict[int, Room] = {}
        if choices.dealt:
            first = self.nodes.allocate(tp)
            assert first == FIRST_NODE
            for rank in range(tp):
                self.nodes.give(np.array([first + rank]), rank)
        self.at = self.start = 0
        self.made_by = {t: op for op in trace.ops for t in op.outs if t >= 0 and t not in op.writes}
        self.made_in = {t: op.call for op in reversed(trace.ops) for t in op.outs if t >= 0}
        for tid in dict.fromkeys(trace.leaves.values()):
            if trace.tensors[tid].parameter or tid in choices.dealt:
                self.leaf(tid)
        for tid, room in choices.room.items():
            if room is not None and tid not in self.made_by:
                self.states[tid] = Owned(room.owners(self.shape(tid)))

    @cached_property
    def written(self) -> set[int]:
        """Tensors that are written into."""
        return {t for op in self.trace.ops for t in op.writes}

    @cached_property
    def reach(self) -> Any:
        """Where tensors go from where they are made."""
        from autotp.ownership.reach import Reach

        return Reach(self.trace)

    def leaf(self, tid: int) -> None:
        """Give every index of every dim of a parameter (or of a statistics buffer) a node."""
        info = self.trace.tensors[tid]
        vecs = []
        for d, n in enumerate(info.shape):
            first = self.base[tid, d] = self.nodes.allocate(n)
            if n > 1:
                vecs.append(Vec(tid, d, d, torch.arange(first, first + n)))
        self.states[tid] = Weights(tuple(vecs), frozenset([tid]))
        if tid in self.choices.dealt:
            dim, per_rank = self.choices.dealt[tid]
            self.cut[tid] = dim
            for rank, mine in enumerate(per_rank):
                self.nodes.give(self.base[tid, dim] + np.asarray(mine, dtype=np.int64), rank)

    # ------------------------------------------------------------ reading
    def shape(self, tid: int) -> tuple[int, ...]:
        return self.trace.tensors[tid].shape

    def owners(self, tid: int) -> Tensor | None:
        """Owners of a cut activation, or of weights whose cut is settled; None if whole or still open."""
        s = self.states.get(tid)
        if isinstance(s, Owned):
            return s.owners
        if isinstance(s, Weights):
            for v in s.vecs:
                if self.cut.get(v.param) == v.param_dim:
                    return self.spread(v, self.shape(tid))
        return None

    def is_cut(self, tid: int) -> bool:
        """Whether ranks hold parts of a tensor."""
        return self.owners(tid) is not None

    def disjoint(self, tid: int) -> Disjoint | None:
        """The state of a tensor of which each rank has computed other rows."""
        s = self.states.get(tid)
        return s if isinstance(s, Disjoint) else None

    def is_apart(self, tid: int) -> bool:
        """Whether the ranks hold parts of a tensor, or terms of it."""
        return self.is_cut(tid) or self.disjoint(tid) is not None

    def open_weights(self, tid: int) -> Weights | None:
        """The weights state of a tensor whose cut is not settled yet."""
        s = self.states.get(tid)
        return s if isinstance(s, Weights) and self.owners(tid) is None else None

    @staticmethod
    def spread(v: Vec, shape: tuple[int, ...]) -> Tensor:
        """A vector of nodes along one dim as an owner tensor."""
        view = [1] * len(shape)
        view[v.dim] = shape[v.dim]
        return v.nodes.view(view).expand(shape)

    def count(self, o: Tensor) -> int:
        return len(self.nodes.distinct(o))

    def by_tokens(self, o: Tensor | None) -> bool:
        """Whether an owner tensor is one of token positions."""
        return o is not None and self.streams.of(o) is not None

    def is_loose(self, o: Tensor) -> bool:
        """Whether owners are bare outputs of column-cut layers: no two of one layer belong together, none is read yet.

        Then the cut can be closed where it was made, at no loss. (A residual stream is not to be cut by features.)
        """
        if self.by_tokens(o):
            return False
        mine = np.zeros(self.nodes.used, dtype=bool)
        mine[self.nodes.distinct(o)] = True
        roots = self.nodes.find(np.arange(self.nodes.used))
        nodes = np.flatnonzero(mine[roots])  # of all parameters, those that belong to these groups
        bases = np.fromiter(self.base.values(), dtype=np.int64)
        order = np.argsort(bases, kind="stable")
        where = order[np.searchsorted(bases[order], nodes, side="right") - 1]
        places = list(self.base)
        for at in np.unique(where):
            tid, dim = places[at]
            here = nodes[where == at]
            here = roots[here[(here >= bases[at]) & (here < bases[at] + self.shape(tid)[dim])]]
            if self.cut.get(tid) != dim or not len(here):
                continue
            role = self.roles.get(tid, {}).get(dim)
            read = role == "in" or (role == "batch" and self.choices.dims.get(tid) == dim)  # a batch by choice: experts
            if read or len(np.unique(here)) < len(here):
                return False
        return True

    def first_yields(self, a: Tensor, b: Tensor) -> bool:
        """Of two tensors whose cuts exclude each other: whether the first is to be made whole."""
        if self.by_tokens(a) != self.by_tokens(b):
            return self.by_tokens(a)
        loose = self.is_loose(a), self.is_loose(b)
        return loose[0] if loose[0] != loose[1] else self.count(a) <= self.count(b)

    # ------------------------------------------------------------ merging
    def merge(self, a: Tensor, b: Tensor, *also: Tensor) -> bool:
        """Merge the owners of two tensors elementwise, unless that leaves one with fewer groups than ranks."""
        x, y = pairs(a, b)
        return self._merge(x, y, (a, b, *also))

    def merge_along(self, o: Tensor, dims: list[int]) -> Tensor | None:
        """Merge owners along dims; the merged owner tensor, or None if too few groups would be left."""
        dims = [d for d in dims if varies(o, d)]
        if not dims:
            return o
        x, y = along(o, dims)
        if not self._merge(x, y, (o,)):
            return None
        return self.nodes.canonical(o)

    def _merge(self, x: np.ndarray, y: np.ndarray, watched: tuple[Tensor, ...]) -> bool:
        differ = x != y
        if not differ.any():
            return True
        x, y = x[differ], y[differ]
        if not self.streams.may_merge(x, y, self.at) or self.nodes.parts_ranks(x, y):
            return False
        cores = [core(w).reshape(-1).numpy() for w in watched]
        if min(self.nodes.groups_after(x, y, *cores)) < self.tp:
            return False
        self.nodes.union(x, y)
        return True

    # ------------------------------------------------------------ weights
    def allowed(self, v: Vec) -> bool:
        """Whether a parameter may (still) be cut along the dim of this vector."""
        forced = self.choices.dims.get(v.param, v.param_dim)
        settled = self.cut.get(v.param, v.param_dim)
        return forced == v.param_dim and settled == v.param_dim and self.count(v.nodes) >= self.tp

    def options(self, w: Weights, dim: int) -> list[list[Vec]]:
        """The ways to cut weights along ``dim`` of the tensor: one vector of every parameter that lies along it.

        A dim that two dims of one parameter were joined into (heads and features per head) can be cut by either.
        """
        by_param: dict[int, list[Vec]] = {}
        for v in w.at(dim):
            by_param.setdefault(v.param, []).append(v)
        lists = [[v for v in vecs if self.allowed(v)] for vecs in by_param.values()]
        if not lists or not all(lists):
            return []
        return [[v, *(rest[0] for rest in lists[1:])] for v in lists[0]]

    def settle(self, w: Weights, dim: int, choice: list[Vec] | None = None) -> Vec | None:
        """Cut the weights along ``dim`` of the tensor, if all their parameters allow it; a vector of that dim."""
        if choice is None:
            options = self.options(w, dim)
            if not options:
                return None
            choice = options[0]
        for v in choice:
            self.cut[v.param] = v.param_dim
        return choice[0]

    def role(self, w: Weights, dim: int, role: str) -> None:
        """Remember what a dim of the weights is to the operation that uses them."""
        for v in w.at(dim):
            self.roles.setdefault(v.param, {}).setdefault(v.param_dim, role)

    # ------------------------------------------------------------ what rules say
    def want(self, tid: int, kind: str = "as", dims: dict[int, tuple[int, int] | Tensor] | None = None) -> None:
        self.wants[self.at].append(Want(tid, kind, tuple((dims or {}).items())))

    def note(self, tid: int, reason: str) -> None:
        """Remember why the parameters behind a tensor are whole here."""
        s = self.states.get(tid)
        for p in s.params if isinstance(s, Weights) else ():
            self.reasons.setdefault(p, []).append(reason)

    def whole(self, tid: int, reason: str) -> None:
        """Ask for all of an operand; what cut it before is gathered, for the given reason."""
        self.want(tid)
        self.note(tid, reason)
        state = self.states.get(tid)
        if isinstance(state, Owned) or (isinstance(state, Disjoint) and tid not in self.written):
            self.new_gather.setdefault(tid, reason)

    def all_whole(self, op: Op, reason: str) -> None:
        for tid in dict.fromkeys(op.ins):
            self.whole(tid, reason)
        self.put(op, None)

    def put(self, op: Op, state: State | Tensor, out: int = 0) -> None:
        """Set the state of a result. In-place operations keep the owners that their target has."""
        tid = op.outs[out] if out < len(op.outs) else -1
        if tid < 0:
            return
        if isinstance(state, Tensor):
            state = Owned(compress(state))
        if isinstance(state, Owned) and self.by_tokens(state.owners) and not self.streams.sound(state.owners):
            for t in op.ins:
                if self.by_tokens(self.owners(t)):
                    self.new_gather.setdefault(t, f"{op.func.overloadpacket} takes its tokens apart")
            state = None
        if tid in op.writes and state is None:
            if self.owners(tid) is not None:
                self.new_gather.setdefault(tid, f"op {op.func} writes into it")
            if self.trace.tensors[tid].leaf is not None:
                return
        self.states[tid] = state

    # ------------------------------------------------------------ the pass
    @torch_hooks.unwatched
    def run(self) -> Ownership:
        from autotp.ownership import rules  # noqa: F401  (fills the tables)

        trace = self.trace
        for call in trace.calls:
            if call.index in self.choices.opaque:
                self._opaque(call)
                continue
            self.start = self.at = call.start
            whole_call = CALL_RULES.get(call.func)
            if whole_call is not None and whole_call(self, call):
                self._close(call)
                continue
            for i in range(call.start, call.stop):
                self.at = i
                self._step(trace.ops[i])
            self._close(call)
        return self

    def _step(self, op: Op) -> None:
        from autotp.ownership.writes import writes_part

        if all(self.states.get(t) is None and t not in self.partial for t in op.ins):
            for t in op.outs:
                room = self.choices.room.get(t) if t not in op.writes else None
                self.states.setdefault(t, Owned(room.owners(self.shape(t))) if room is not None else None)
            return None
        if any(self.disjoint(t) is not None for t in op.ins):
            from autotp.ownership.disjoint import carry_disjoint

            return carry_disjoint(self, op)
        if any(t in self.partial for t in op.ins):
            from autotp.ownership.rules_linear import carry_partial

            carry_partial(self, op)
            return None
        if any(writes_part(self, op, t) for t in op.writes):
            self.new_opaque[op.call] = f"op {op.func} writes into a part of a cut tensor"
            return no_rule(self, op)
        find_rule(op)(self, op)

    def _opaque(self, call: Any) -> None:
        reason = f"{call.name} has no rule for what happens inside it"
        if call.shut:
            reason += f": it {call.shut}"
            if RULES.get(call.func, kept_whole) is not kept_whole:
                raise RuleError(f"{call.name}: its rule cannot be followed, as it {call.shut}")
        for i in range(call.start, call.stop):
            self.at = i
            op = self.trace.ops[i]
            for tid in dict.fromkeys(op.ins):
                if tid in self.states and self.states[tid] is not None:
                    self.whole(tid, reason)
            for t in op.outs:
                if self.trace.tensors[t].leaf is None if t >= 0 else False:
                    self.states[t] = None

    def _close(self, call: Any) -> None:
        """A call's results leave it complete: partial sums are summed, and gathers asked for are made."""
        from autotp.trees import Ref

        for x in call.outs:
            if not isinstance(x, Ref):
                continue
            state = self.states.get(x.tid)
            if x.tid in self.choices.later:
                continue
            if x.tid in self.partial:
                self.leave[x.tid] = self.partial[x.tid]
                self.states[x.tid] = None
            elif x.tid in self.choices.gather and isinstance(state, Owned) and self.made_in.get(x.tid) == call.index:
                self.gathered[x.tid] = state.owners
                self.states[x.tid] = None
            elif x.tid in self.choices.gather and isinstance(state, Disjoint) and self.made_in[x.tid] == call.index:
                self.leave[x.tid] = -1
                self.was_partial.add(x.tid)
                self.states[x.tid] = None
            if x.tid in self.choices.tokens and self.states.get(x.tid) is None:
                self._keep_tokens(x.tid)
        self.was_partial |= set(self.partial)
        self.partial = {t: of for t, of in self.partial.items() if t in self.choices.later}

    def _keep_tokens(self, tid: int) -> None:
        """Of a whole result, every rank keeps a part of the tokens."""
        if tid in self.gathered or tid in self.choices.gather:
            return
        dim, shape = self.choices.tokens[tid], self.shape(tid)
        view = [1] * len(shape)
        view[dim] = -1
        self.scattered[tid] = self.streams.open(shape[dim]).view(view).expand(shape)
        self.states[tid] = Owned(self.scattered[tid])
