"""Sequence parallelism at run time: how many tokens there are, and the collectives that cut and join them.

============  =======================  =======================
              forward                  backward
============  =======================  =======================
sum_part      sum, each its tokens     all tokens
take          each its tokens          all tokens
gather_sum    all tokens               sum, each its tokens
join          all tokens               each its tokens
============  =======================  =======================
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotp.call_edits import Cuts, NumberEdit, OperandEdit, ResultEdit
from autotp.errors import AutotpError
from autotp.ownership.dealing import Tokens, shares
from autotp.styles.comm import Ranks, differentiated, enter, gather, leave, once, padded, part
from autotp.torch_dynamo import changing
from autotp.trees import flatten

Parts = tuple[tuple[int, int], ...]  # of each rank, its first token and how many it has


class TokensNotCut(UserWarning):
    """A call of a model that is sharded with sequence parallelism has too few tokens for it; told once per length."""


class _Known:
    """The number of tokens of each stream, as an attribute: of a dict that is written to, a compiler reads them all."""


@dataclass
class Lengths:
    """How many tokens each stream of the running forward has. Shapes decide, so all ranks decide alike."""

    ranks: Ranks
    known: _Known = field(default_factory=_Known)
    told: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Another forward begins."""
        vars(self.known).clear()

    def parts(self, stream: int) -> Parts | None:
        """Which tokens each rank has; None where they are not cut, because there are fewer than ranks."""
        n = changing(self.known, f"n{stream}")
        if n is None:
            raise AutotpError(
                "a part of a model with sequence parallelism was called by itself, where it is not known how many "
                "tokens there are: call the whole model"
            )
        return shares(n, self.ranks.size) if n >= self.ranks.size else None

    def settle(self, stream: int, n: int, anew: bool) -> Parts | None:
        """Take note of the tokens of a stream, where a tensor that has all of them is about to be cut."""
        before = None if anew else changing(self.known, f"n{stream}")
        if before is None:
            setattr(self.known, f"n{stream}", n)
        elif before != n:
            raise AutotpError(
                f"two tensors whose tokens are cut together have {before} and {n} of them: the plan was made for equal "
                "lengths. Pass a sample with lengths as they will be: autotp.shard(model, mesh, sample=(args, kwargs))"
            )
        if n < self.ranks.size and n not in self.told:
            self.told.add(n)
            warnings.warn(
                f"sequence parallelism is off in calls with {n} token{'s' * (n > 1)}, too few for {self.ranks.size} "
                "ranks: they run with whole tensors between the cut layers",
                TokensNotCut,
                stacklevel=2,
            )
        return self.parts(stream)

    def number(self, x: int, edit: NumberEdit) -> int:
        """A number that counts a rank's tokens as one that counts all of them, or the other way round."""
        assert edit.stream is not None
        parts = self.parts(edit.stream)
        if parts is None:
            return x
        mine, all_ = parts[self.ranks.rank][1], sum(parts[-1])
        old, new = (mine, all_) if edit.up else (all_, mine)
        if x % old:
            raise AutotpError(f"the plan expects a multiple of {old} tokens here, got {x}")
        return x // old * new

    def remember(self, out: Any) -> None:
        """When the backward comes to these outputs, what it recomputes from there on has this forward's lengths."""
        lengths = dict(vars(self.known))
        for x in flatten(out)[0] if lengths and torch.is_grad_enabled() else ():
            if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf:
                x.register_hook(lambda grad: vars(self.known).update(lengths))


# ---------------------------------------------------------------- edits


def operand(edit: OperandEdit, ranks: Ranks, lengths: Lengths, x: Tensor) -> Tensor:
    """An operand edit that depends on tokens."""
    x = gather(x, tuple(cut for cut in edit.gather if not isinstance(cut[1], Tokens)), ranks)
    for dim, indices in edit.gather:
        parts = lengths.parts(indices.stream) if isinstance(indices, Tokens) else None
        x = x if parts is None else join(checked(x, dim, parts, ranks), dim, parts, ranks)
    if edit.stream is not None:
        parts = lengths.parts(edit.stream)
        if parts is None:
            return x
        if edit.slice:
            return _sliced(edit.slice, edit.enter, parts, ranks, lengths, x)
    if edit.enter and (edit.unless is None or lengths.parts(edit.unless) is None):
        x = enter(x, ranks)
    for dim, indices in edit.slice:
        x = part(x, dim, indices[ranks.rank])
    return once(x, ranks) if edit.once else x


def _sliced(cuts: Cuts, entered: bool, parts: Parts, ranks: Ranks, lengths: Lengths, x: Tensor) -> Tensor:
    for dim, indices in cuts:
        assert isinstance(indices, Tokens)
        lengths.settle(indices.stream, x.shape[dim], anew=False)
        x = take(x, dim, parts, ranks) if entered else _mine(x, dim, parts, ranks)
    return x


def outcome(edit: ResultEdit, ranks: Ranks, lengths: Lengths, alone: bool, x: Tensor) -> Tensor:
    """A result edit that depends on tokens; ``alone``: not within the forward of the whole model."""
    for dim, indices in edit.scatter:
        assert isinstance(indices, Tokens)
        parts = lengths.settle(indices.stream, x.shape[dim], anew=alone)
        if parts is not None:
            return sum_part(x, dim, parts, ranks) if edit.leave else take(x, dim, parts, ranks)
        return leave(x, ranks) if edit.leave else x
    for dim, indices in edit.gather:
        assert isinstance(indices, Tokens)
        parts = lengths.parts(indices.stream)
        if parts is not None:
            x = checked(x, dim, parts, ranks)
            x = gather_sum(x, dim, parts, ranks) if edit.summed else join(x, dim, parts, ranks)
    return x


def checked(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """Raise if a tensor has not this rank's number of tokens, before anyone waits for it."""
    n = parts[ranks.rank][1]
    if x.shape[dim] != n:
        raise AutotpError(
            f"a rank's part of {sum(parts[-1])} tokens has {n} of them, got {list(x.shape)} with "
            f"{x.shape[dim]} in dim {dim}: the plan does not hold for these inputs. Pass a sample like them: "
            "autotp.shard(model, mesh, sample=(args, kwargs))"
        )
    return x


# ---------------------------------------------------------------- collectives


def _mine(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """This rank's tokens of all, as a view."""
    return x.narrow(dim, *parts[ranks.rank])


def _joined(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """Everyone's tokens, in order."""
    found = ranks.all_parts(padded(x, dim, parts[-1][1]).contiguous())
    return torch.cat([p.narrow(dim, 0, n) for p, (_, n) in zip(found, parts, strict=True)], dim)


def _summed(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """This rank's tokens of the sum over the ranks."""
    size, n = parts[-1][1], parts[ranks.rank][1]
    if size == parts[0][1]:
        pieces = x.unflatten(dim, (len(parts), size)).movedim(dim, 0)
    else:  # of equal size, so that of a rank with fewer there is a token of the next one after them
        pieces = torch.stack([x.narrow(dim, first, size) for first, _ in parts])
    mine = ranks.sum_pieces(pieces)
    return mine if n == size else mine.narrow(dim, 0, n).clone()


class _SumPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
        ctx.how = dim, parts, ranks
        return _summed(x, dim, parts, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (gather_sum if differentiated() else _joined)(grad, *ctx.how), None, None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
        ctx.how = dim, parts, ranks
        return _joined(x, dim, parts, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (sum_part if differentiated() else _summed)(grad, *ctx.how), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
        ctx.how = dim, parts, ranks
        return _mine(x, dim, parts, ranks).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (join if differentiated() else _joined)(grad, *ctx.how), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
        ctx.how = dim, parts, ranks
        return _joined(x, dim, parts, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = enter(grad, ctx.how[2]) if differentiated() else grad
        return _mine(grad, *ctx.how), None, None, None


def sum_part(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """A partial sum: each rank keeps its tokens of the whole one."""
    return _SumPart.apply(x, dim, parts, ranks)


def gather_sum(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """All tokens, for readers whose gradients are partial."""
    return _GatherSum.apply(x, dim, parts, ranks)


def take(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """This rank's tokens of a whole tensor."""
    return _Take.apply(x, dim, parts, ranks)


def join(x: Tensor, dim: int, parts: Parts, ranks: Ranks) -> Tensor:
    """All tokens, for readers whose gradients are whole."""
    return _Join.apply(x, dim, parts, ranks)
