"""A rank's edits of calls, as functions of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp import torch_frames, torch_hooks
from autotp.call_edits import CallEdit, Cuts, ExpertsEdit, NumberEdit, OperandEdit, ResultEdit, SharedEdit
from autotp.errors import NotPlannedError
from autotp.layouts import to_local
from autotp.numbers import edited
from autotp.ownership.rules_shared_norm import SharedNorm
from autotp.styles import tokens, traced_draws
from autotp.styles.comm import Ranks, enter, gather, leave, once, part
from autotp.styles.experts import of_experts
from autotp.styles.random import own_draws
from autotp.styles.shared_classes import shared_classes
from autotp.styles.shared_norm import shared_norm
from autotp.trees import flatten, rebuild

if TYPE_CHECKING:
    from autotp.styles.bound import Running

Change = Callable[[Any], Any]
NoiseCut = tuple[int, Sequence[int], int]  # a dim, this rank's indices of it, of how many


@dataclass(frozen=True)
class Place:
    """Where an edit is made, for messages: a module's edge, or a call in its code."""

    module: str
    site: Any = None

    def check(self, x: Tensor, dim: int, size: int, part: bool) -> None:
        """Raise if a tensor has another size than planned along a dim that is cut or joined here."""
        found = x.shape[dim] if dim < x.ndim else 0
        if found == size:
            return
        where = f" at {torch_frames.describe_site(self.site)}" if self.site else ""
        raise NotPlannedError(
            f"{self.module or 'the model'}{where}: {'this rank is to have' if part else 'planned was a tensor with'} "
            f"{size} elements in dim {dim}, got {list(x.shape)}: the model took another path, or has other inputs, "
            "than when the plan was made. Pass a sample like them: autotp.shard(model, mesh, sample=(args, kwargs))."
        )


def _sizes(cuts: Cuts) -> list[int]:
    """Of the whole tensor, along each dim."""
    return [1 + max((max(i) for i in indices if len(i)), default=-1) for _, indices in cuts]


def operand(edit: OperandEdit, ranks: Ranks, model: Running, place: Place) -> Change:
    """The function that an operand edit is on this rank."""
    of_tokens = edit.of_tokens
    whole = [] if of_tokens else _sizes(edit.slice)

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if edit.sum:
            x = leave(x.clone(), ranks)
        if of_tokens:
            return tokens.operand(edit, ranks, model.lengths, x)
        for dim, indices in edit.gather:
            place.check(x, dim, len(indices[ranks.rank]), part=True)
        x = gather(x, edit.gather, ranks)
        if edit.enter:
            x = enter(x, ranks)
        for (dim, indices), size in zip(edit.slice, whole, strict=True):
            place.check(x, dim, size, part=False)
            x = part(x, dim, indices[ranks.rank])
        return once(x, ranks) if edit.once else x

    return change


def outcome(edit: ResultEdit, ranks: Ranks, model: Running, place: Place) -> Change:
    """The function that a result edit is on this rank."""
    of_tokens = edit.of_tokens

    def change(x: Any) -> Any:
        if edit.scale:
            x = x * edit.scale[ranks.rank]
        if of_tokens:
            return tokens.outcome(edit, ranks, model.lengths, not model.depth, x)
        if edit.leave:
            return leave(x, ranks)
        for dim, indices in edit.gather:
            place.check(x, dim, len(indices[ranks.rank]), part=True)
        return gather(x, edit.gather, ranks)

    return change


@dataclass(frozen=True)
class BoundCall:
    """A call's edits as functions of this rank."""

    operands: tuple[tuple[int, Change], ...]
    numbers: tuple[tuple[int, NumberEdit], ...]
    results: tuple[tuple[int, Change], ...]
    rows: Sequence[int] | None
    of_rows: int
    shared: SharedEdit | None
    experts: ExpertsEdit | None
    random: bool
    noise: tuple[NoiseCut, ...]
    stream: int | None
    model: Running

    @classmethod
    def of(cls, edit: CallEdit, ranks: Ranks, model: Running, place: Place) -> BoundCall:
        return cls(
            tuple((i, operand(e, ranks, model, place)) for i, e in edit.operands.items()),
            tuple(edit.numbers.get(ranks.rank, {}).items()),
            tuple((i, outcome(e, ranks, model, place)) for i, e in edit.results.items()),
            edit.rows[ranks.rank] if edit.rows else None,
            max((max(r) + 1 for r in edit.rows if len(r)), default=0) if edit.rows else 0,
            edit.shared,
            edit.experts,
            edit.random,
            tuple((d, per_rank[ranks.rank], len(set().union(*per_rank))) for d, per_rank in edit.noise),
            edit.stream,
            model,
        )

    def run(self, func: Any, args: Any, kwargs: Any, ranks: Ranks) -> Any:
        leaves, spec = flatten((args, kwargs))
        leaves = [to_local(x) if torch_hooks.is_dtensor(x) else x for x in leaves]
        for i, change in self.operands:
            leaves[i] = change(leaves[i])
        for i, number in self.numbers:
            if isinstance(leaves[i], int) and number.stream is not None:
                leaves[i] = self.model.lengths.number(leaves[i], number)
            elif isinstance(leaves[i], int):
                leaves[i] = edited(leaves[i], number)
        args, kwargs = rebuild(leaves, spec)
        if self.experts is not None:
            result = of_experts(self.experts, ranks.rank, func, leaves, spec)
        elif self.rows is not None:
            result = look_up(self.rows, self.of_rows, func, args, kwargs)
        elif self.shared is not None:
            together = shared_norm if isinstance(self.shared.what, SharedNorm) else shared_classes
            result = together(self.shared, func, args, kwargs, ranks)
        elif self.random and self._is_cut() and torch_hooks.draws(func, args, kwargs):
            result = noise(self.noise, func, *args, **kwargs) if self.noise else self._drawn(func, args, kwargs, ranks)
        else:
            result = func(*args, **kwargs)
        if not self.results:
            return result
        outs, out_spec = flatten(result)
        for i, change in self.results:
            outs[i] = change(outs[i])
        return rebuild(outs, out_spec)

    def _is_cut(self) -> bool:
        return self.stream is None or self.model.lengths.parts(self.stream) is not None

    @staticmethod
    def _drawn(func: Any, args: Any, kwargs: Any, ranks: Ranks) -> Any:
        if torch.compiler.is_compiling():
            return traced_draws.own(func, args, kwargs, ranks)
        with own_draws(ranks):
            return func(*args, **kwargs)


def noise(cuts: Sequence[NoiseCut], func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's part of ``func(input)`` as the unsharded model draws it."""
    shape = list(input.shape)
    for dim, _, size in cuts:
        shape[dim] = size
    order = sorted(range(input.ndim), key=input.stride, reverse=True)  # in which numbers are drawn
    made: Tensor = func(torch.empty_permuted(shape, order, dtype=input.dtype, device=input.device), *args, **kwargs)
    for dim, mine, _ in cuts:
        if isinstance(mine, range) and mine.step == 1:
            made = made.narrow(dim, mine.start, len(mine))
        else:
            made = made.index_select(dim, torch.tensor(mine, device=made.device))
    return made.clone()


def look_up(rows: Sequence[int], of: int, func: Any, args: Any, kwargs: Any) -> Tensor:
    """An embedding ``of`` so many rows, of which this rank has some: the others give zeros."""
    given = torch_hooks.embedding_arguments(func, args, kwargs)
    ids, weight, padding = given["ids"], given["weight"], given["padding_idx"]
    if not rows:
        return weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum() * 0
    if isinstance(rows, range):
        local, missing = ids - rows[0], (ids < rows[0]) | (ids > rows[-1])
    else:
        place = torch.full((of,), -1, dtype=ids.dtype, device=ids.device)
        place[torch.tensor(rows, device=ids.device)] = torch.arange(len(rows), dtype=ids.dtype, device=ids.device)
        local = place[ids]
        missing = local < 0
    local = local.masked_fill(missing, 0)
    at = rows.index(padding) if padding is not None and padding in rows else None
    out = torch.nn.functional.embedding(local, weight, padding_idx=at)
    return out.masked_fill(missing.unsqueeze(-1), 0)
