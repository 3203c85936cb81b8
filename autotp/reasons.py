"""The rows of a plan: one per parameter, with its style and why, in the model's own terms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from autotp.layouts import Layout
from autotp.ownership.dealing import local_shape
from autotp.ownership.rules_shared_norm import SharedNorm
from autotp.plan_types import Row
from autotp.search import Analysis
from autotp.trees import Ref


class _Rows:
    """What the reasons are drawn from, gathered once."""

    def __init__(self, analysis: Analysis) -> None:
        self.a, self.own, self.trace = analysis, analysis.own, analysis.trace
        self.made: dict[int, Row] = {}
        attended = self.own.attended
        self.heads = np.unique(self.own.nodes.find(np.concatenate(attended))) if attended else np.zeros(0, dtype=int)
        self.tried = [(name, np.unique(self.own.nodes.find(groups))) for name, groups in self.own.tried]
        self.classed = [(name, np.unique(self.own.nodes.find(groups))) for name, groups in self.own.classed]
        self.entered: set[int] = set()
        self.gathers: dict[int, str] = {}
        self.normed: set[int] = set()
        self.by_tokens: set[int] = set()  # whole, and used on a slice of the tokens
        for c in self.trace.calls:
            edit = analysis.edits[c.index]
            params = [x.tid for x in c.leaves if isinstance(x, Ref) and self.trace.tensors[x.tid].parameter]
            self.normed |= set(params) if edit.shared and isinstance(edit.shared.what, SharedNorm) else set()
            for i, e in edit.operands.items():
                if e.enter:
                    (self.entered if e.stream is None else self.by_tokens).add(c.leaves[i].tid)
            for i, r in edit.results.items():
                if r.gather:
                    for p in params:
                        self.gathers[p] = analysis.notes.get(c.outs[i].tid, "nothing after it needs it cut")

    def row(self, name: str, tid: int, dtype: str) -> Row:
        if tid in self.made:  # a tied parameter, or one of a block that is like another
            first = self.trace.canonical[name]
            return replace(self.made[tid], name=name, dtype=dtype, tied_to=first if first != name else None)
        shape = self.trace.tensors[tid].shape
        sets = self.a.dealing.sets(tid)
        style, dim = self._style(tid)
        first = self.trace.canonical[name]
        self.made[tid] = Row(
            name=name,
            shape=shape,
            local_shape=local_shape(shape, sets, 0),
            style=style,
            dim=dim,
            reason=self._cut_reason(tid, dim) if dim is not None else self._whole_reason(tid),
            dtype=dtype,
            tied_to=first if first != name else None,
        )
        return self.made[tid]

    def _style(self, tid: int) -> tuple[str, int | None]:
        sets = self.a.dealing.sets(tid)
        if not sets and tid in self.by_tokens:
            return "sequence_parallel", None
        if not sets:
            return ("replicated_with_grad_allreduce" if tid in self.entered else "replicate"), None
        dim, per_rank = next(iter(sets.items()))
        if tid in self.a.dealing.at_rest:
            return "gathered_at_use", dim
        roles = self.own.roles.get(tid, {})
        role = roles.get(dim, "out")
        if tid in self.own.by_expert:
            return "expertwise", dim
        if role in ("rows", "features") or "rows" in roles.values():
            return ("embedding_rowwise" if roles.get(0) == "rows" and dim == 0 else "embedding_colwise"), dim
        packed = not all(len(ranges) == 1 for ranges in Layout.from_indices(dim, per_rank).pieces)
        prefix = "packed_" if packed else ""
        if role == "in":
            return (f"{prefix}rowwise" if tid not in self.own.split_input or packed else "rowwise_split_input"), dim
        return f"{prefix}colwise" + ("_gather_output" if tid in self.gathers and len(roles) else ""), dim

    def _cut_reason(self, tid: int, dim: int) -> str:
        if tid in self.a.dealing.at_rest:
            return self._rest_reason(tid, dim)
        base, n = self.own.base[tid, dim], self.trace.tensors[tid].shape[dim]
        groups, sizes = np.unique(self.own.nodes.find(np.arange(base, base + n)), return_counts=True)
        shares = np.bincount(self.a.dealing.rank_of[groups], minlength=self.a.dealing.tp).tolist()
        each = str(shares[0]) if len(set(shares)) == 1 else "/".join(map(str, shares))
        width = np.unique(sizes).tolist()
        role = self.own.roles.get(tid, {}).get(dim, "out")
        kinds = {"in": "inputs", "rows": "rows", "features": "features", "batch": "batches", "expert": "experts"}
        kind = kinds.get(role, "outputs")
        span = f"{width[0]}" if len(width) == 1 else f"{width[0]} to {width[-1]}"
        if self.heads.size and np.isin(groups, self.heads).all():
            one = "outputs" if role == "out" else kind
            text = f"{len(groups)} head groups of {span} {one}, {each} per rank"
        elif width == [1]:
            text = f"{n} {kind}, {each} per rank"
        else:
            text = f"{len(groups)} groups of {span} {kind} that belong together, {each} per rank"
        if tid in self.gathers and role != "in":
            text += f"; its output is gathered: {self.gathers[tid]}"
        if tid in self.normed:
            text += "; the norm's statistics are shared by the ranks"
        for name in dict.fromkeys(n for n, of in self.tried if np.isin(groups, of).any()):
            text += f"; {name} keeps it cut, as was found by running it"
        for name in dict.fromkeys(n for n, of in self.classed if np.isin(groups, of).any()):
            text += f"; {name} runs on the parts of its output"
        if tid in self.own.by_expert:
            text += "; each rank computes the rows of its own, which are then summed"
        if role == "rows":
            text += "; each rank looks up its own rows"
        if tid in self.own.split_input:
            text += "; its input is split over the ranks"
        return text

    def _rest_reason(self, tid: int, dim: int) -> str:
        held = [len(s) for s in self.a.dealing.sets(tid)[dim]]
        each = str(held[0]) if len(set(held)) == 1 else "/".join(map(str, held))
        why = self._whole_reason(tid)
        if not any(tid in op.ins for op in self.trace.ops):
            why = "its module was not reached by the sample"
        return f"kept in parts, {each} of {sum(held)} per rank, and put together when its module runs: {why}"

    def _whole_reason(self, tid: int) -> str:
        if tid in self.by_tokens:
            return "is used on a slice of the tokens; its gradient is summed over the ranks"
        forced = self.own.choices.dims.get(tid, 0) is None
        if tid in self.a.notes:
            return self.a.notes[tid]
        if tid in self.a.chosen and forced:
            return "left whole by choice"
        reasons = list(dict.fromkeys(self.own.reasons.get(tid, [])))
        if reasons:
            return reasons[-1]
        if forced:
            return "left whole by choice"
        read = any(tid in op.ins for op in self.trace.ops)
        return "is read whole" if read else "is not used by the forward that was traced"


def rows_of(model: nn.Module, analysis: Analysis) -> tuple[Row, ...]:
    """One row per parameter, in the model's order; tied names each have one, pointing to the first."""
    rows = _Rows(analysis)
    return tuple(
        rows.row(name, analysis.trace.leaves[name], str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters(remove_duplicate=False)
    )


def whole_rows(model: nn.Module, reason: str) -> tuple[Row, ...]:
    """Rows of a model of which nothing is cut."""
    first: dict[int, str] = {}
    out = []
    for name, p in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(p), name)
        shape, dtype = tuple(p.shape), str(p.dtype).removeprefix("torch.")
        out.append(
            Row(name=name, shape=shape, local_shape=shape, style="replicate", dim=None, reason=reason, dtype=dtype,
                tied_to=tied if tied != name else None)
        )  # fmt: skip
    return tuple(out)


__all__ = ["rows_of", "whole_rows"]
