"""Losses over classes of which this rank has some (a vocabulary): no rank ever has the logits of all of them.

===============  ====================================================  ===========================
                 exchanged forward, numbers per token and rank         backward, per token
===============  ====================================================  ===========================
cross entropy    largest logit, sum of exponentials, target's logit    none: softmax minus target
logsumexp        logsumexp of its part                                 none
(log) softmax    largest logit, sum of exponentials                    the sum of the gradients
nll loss, pick   none: zeros where another rank has the class          none
===============  ====================================================  ===========================

The last two leave a sum over the ranks to be made. (Megatron-LM, arXiv 1909.08053, section 3, has the first.) What is
exchanged is in float32 at least, and the sums of all ranks are the same numbers, so all ranks have the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotp.call_edits import SharedEdit
from autotp.errors import NotPlannedError
from autotp.ownership.rules_shared_classes import SharedClasses, bound, of_probabilities
from autotp.styles.comm import Ranks, differentiated, enter, leave, part
from autotp.styles.result_types import result_dtype, wide

IGNORED = -100  # torch's default


class Classes(NamedTuple):
    """Along which dim of a tensor which classes of how many this rank has."""

    dim: int
    mine: Sequence[int]
    of: int
    ranks: Ranks


def shared_classes(edit: SharedEdit, func: Any, args: Any, kwargs: Any, ranks: Ranks) -> Tensor:
    """What ``func`` makes of the whole input: all of it, this rank's part, or this rank's summand."""
    what = edit.what
    assert isinstance(what, SharedClasses)
    classes = Classes(what.cut, edit.parts[ranks.rank], sum(len(p) for p in edit.parts), ranks)
    given = bound(func, args, kwargs)
    x = given["input"] if given.get("dtype") is None else given["input"].to(given["dtype"])
    if x.ndim <= what.cut or x.shape[what.cut] != len(classes.mine):
        raise NotPlannedError(
            f"{what.kind}: this rank is to have {len(classes.mine)} of {classes.of} classes in dim {what.cut}, got "
            f"{list(x.shape)}: the model took another path than when the plan was made. Pass a sample that takes this "
            "path: autotp.shard(model, mesh, sample=(args, kwargs))."
        )
    dtype = result_dtype(func, what.kind, x, given.get("target"))
    return _KINDS[what.kind](classes, x, given, dtype).to(dtype)


# ---------------------------------------------------------------- losses


def _cross_entropy(classes: Classes, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    target, weight = given["target"], given.get("weight")
    smoothing, ignored = given.get("label_smoothing") or 0.0, given.get("ignore_index", IGNORED)
    if of_probabilities(target):
        return _of_probabilities(classes, x, given, smoothing)
    weight = None if weight is None else weight.to(wide(x.dtype))
    losses = _CrossEntropy.apply(x, target, weight, classes, ignored, smoothing)
    return _reduced(losses, target, weight, ignored, given.get("reduction", "mean"))


def _of_probabilities(classes: Classes, x: Tensor, given: dict[str, Any], smoothing: float) -> Tensor:
    """This rank's summand: its classes, each with its probability (Tensor) as the target."""
    dim, weight, reduction = classes.dim, given.get("weight"), given.get("reduction", "mean")
    target = given["target"].to(wide(x.dtype)) * (1 - smoothing) + smoothing / classes.of
    weights = _weights(classes, weight, x.ndim)
    target = target if weights is None else target * weights
    losses = -(target * _LogSoftmax.apply(x, classes, wide(x.dtype))).sum(dim)
    return losses if reduction == "none" else losses.sum() / (losses.numel() if reduction == "mean" else 1)


def _nll_loss(classes: Classes, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    target, weight, ignored = given["target"], given.get("weight"), given.get("ignore_index", IGNORED)
    weight = None if weight is None else weight.to(wide(x.dtype))
    place, here = _place(target, classes, target == ignored)
    losses = -_picked(x, place, here, classes.dim)
    losses = losses if weight is None else losses * _of_target(weight, target, target == ignored)
    return _reduced(losses, target, weight, ignored, given.get("reduction", "mean"))


def _reduced(losses: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    left_out = target == ignored
    counted = (~left_out).to(losses.dtype) if weight is None else _of_target(weight, target, left_out)
    return losses.sum() / counted.sum()


def _of_target(weight: Tensor, target: Tensor, left_out: Tensor) -> Tensor:
    """The weight of every token's class; none for those left out."""
    return weight[target.masked_fill(left_out, 0)].masked_fill(left_out, 0)


class _CrossEntropy(torch.autograd.Function):
    """The loss of every token, whole: ``sum over classes of q (logsumexp(x) - x)``.

    q is the smoothed target times the weights. Keeps the logits (of this rank) and a number per token.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, classes: Classes, ignored: int, smoothing: float
    ) -> Tensor:
        dim, left_out = classes.dim, target == ignored
        place, here = _place(target, classes, left_out)
        top, total = _highest(x, dim)
        sums = [_picked(x, place, here, dim)]
        if smoothing:
            sums.append(_weighted(x, _weights(classes, weight, x.ndim), dim))
        parts = classes.ranks.all_parts(torch.stack([top.squeeze(dim), total.squeeze(dim), *sums]))
        top, log_total = _together(parts)
        sums = [torch.stack([p[2 + i] for p in parts]).sum(0) for i in range(len(sums))]
        hard, even = _coefficients(classes, target, left_out, weight, smoothing, x)
        losses = hard * (log_total - (sums[0] - top))
        if smoothing:
            losses = losses + even * (_all(classes, weight) * (log_total + top) - sums[1]).masked_fill(left_out, 0)
        ctx.save_for_backward(x, target, weight, (top + log_total).unsqueeze(dim))
        ctx.classes, ctx.ignored, ctx.smoothing = classes, ignored, smoothing
        return losses.masked_fill(left_out, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, target, weight, normaliser = ctx.saved_tensors
        classes, dim, left_out = ctx.classes, ctx.classes.dim, target == ctx.ignored
        again = differentiated()
        if again:
            grad, normaliser = enter(grad, classes.ranks), enter(_LogSumExp.apply(x, classes), classes.ranks)
        grad = grad.masked_fill(left_out, 0)
        place, here = _place(target, classes, left_out)
        hard, even = _coefficients(classes, target, left_out, weight, ctx.smoothing, x)
        p = x - normaliser
        p = p.exp() if again else p.exp_()
        scale = (grad * (hard + even * _all(classes, weight))).unsqueeze(dim)
        p = p * scale if again else p.mul_(scale)
        if ctx.smoothing:
            q, weights = (grad * even).unsqueeze(dim), _weights(classes, weight, x.ndim)
            q = q if weights is None else q * weights
            p = p - q if again else p.sub_(q)
        q = (grad * hard).masked_fill(~here, 0).neg().unsqueeze(dim)
        p = p.scatter_add(dim, place, q) if again else p.scatter_add_(dim, place, q)
        return p.to(x.dtype), None, None, None, None, None


def _coefficients(
    classes: Classes, target: Tensor, left_out: Tensor, weight: Tensor | None, smoothing: float, x: Tensor
) -> tuple[Tensor, float]:
    """Of every token the factor of its own class, and the factor that all classes have."""
    hard = (~left_out).to(wide(x.dtype)) if weight is None else _of_target(weight, target, left_out)
    return hard * (1 - smoothing), smoothing / classes.of


def _weights(classes: Classes, weight: Tensor | None, ndim: int) -> Tensor | None:
    """The weights of this rank's classes, to be broadcast against its logits."""
    if weight is None:
        return None
    return part(weight, 0, classes.mine).view([-1 if d == classes.dim else 1 for d in range(ndim)])


def _weighted(x: Tensor, weights: Tensor | None, dim: int) -> Tensor:
    return x.sum(dim, dtype=wide(x.dtype)) if weights is None else (x * weights).sum(dim)


def _all(classes: Classes, weight: Tensor | None) -> Any:
    return classes.of if weight is None else weight.sum()


# ---------------------------------------------------------------- normalisers


class _LogSumExp(torch.autograd.Function):
    """The logarithm of the sum of exponentials over all classes; whole, the dim kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, classes: Classes) -> Tensor:
        mine = x.to(wide(x.dtype)).logsumexp(classes.dim, keepdim=True)
        out = torch.stack(classes.ranks.all_parts(mine)).logsumexp(0)
        ctx.save_for_backward(x, out)
        ctx.classes = classes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        if differentiated():
            grad, out = enter(grad, ctx.classes.ranks), enter(out, ctx.classes.ranks)
            return ((x - out).exp() * grad).to(x.dtype), None
        return (x - out).exp_().mul_(grad).to(x.dtype), None


class _LogSoftmax(torch.autograd.Function):
    """This rank's part of the logarithms of probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, classes: Classes, dtype: torch.dtype) -> Tensor:
        out = _normalised(x, classes).to(dtype)
        ctx.save_for_backward(out)
        ctx.classes, ctx.dtype = classes, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        grad = grad.to(wide(out.dtype))
        total = _summed(grad, ctx.classes)
        return (grad - out.to(grad.dtype).exp() * total).to(ctx.dtype), None, None


class _Softmax(torch.autograd.Function):
    """This rank's part of the probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, classes: Classes, dtype: torch.dtype) -> Tensor:
        out = _normalised(x, classes).exp_().to(dtype)
        ctx.save_for_backward(out)
        ctx.classes, ctx.dtype = classes, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        grad, p = grad.to(wide(out.dtype)), out.to(wide(out.dtype))
        total = _summed(grad * p, ctx.classes)
        return (p * (grad - total)).to(ctx.dtype), None, None


def _normalised(x: Tensor, classes: Classes) -> Tensor:
    top, total = _highest(x, classes.dim)
    top, log_total = _together(classes.ranks.all_parts(torch.stack([top, total])))
    return (x - top).sub_(log_total)


def _highest(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest of this rank's logits, and the sum of exponentials relative to it (if it is finite)."""
    top = x.amax(dim, keepdim=True).to(wide(x.dtype))
    return top, (x - top.masked_fill(top.isinf(), 0)).exp_().sum(dim, keepdim=True)


def _together(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest logit of all ranks, and the logarithm of the sum of exponentials relative to it."""
    tops = torch.stack([p[0] for p in parts])
    top = tops.amax(0)
    total = (torch.stack([p[1] for p in parts]) * (tops - top).exp()).sum(0)
    return top, total.log()


def _summed(grad: Tensor, classes: Classes) -> Tensor:
    """The sum over the classes of all ranks."""
    total = grad.sum(classes.dim, keepdim=True)
    if differentiated():
        return enter(leave(total, classes.ranks), classes.ranks)
    return classes.ranks.sum_(total)


# ---------------------------------------------------------------- picking


def _place(index: Tensor, classes: Classes, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where this rank has the class of each token (anywhere if it has not), with the classes' dim, and whether it has.

    An index that is no class ends up outside of what any rank has, so looking it up fails as on the whole.
    """
    index = index if left_out is None else index.masked_fill(left_out, 0)
    outside = (index < 0) | (index >= classes.of)
    _check(index, outside)
    if isinstance(classes.mine, range):
        place, here = index - classes.mine.start, (index >= classes.mine.start) & (index < classes.mine.stop)
    else:
        table = torch.full((classes.of,), -1, dtype=index.dtype, device=index.device)
        table[torch.tensor(classes.mine, device=index.device)] = torch.arange(
            len(classes.mine), dtype=index.dtype, device=index.device
        )
        place = table[index.masked_fill(outside, 0)]
        here = (place >= 0) & ~outside
    place = place.masked_fill(~here, 0).masked_fill(outside, classes.of)
    here = here if left_out is None else here & ~left_out
    return (place if left_out is None else place.unsqueeze(classes.dim)), here


def _check(index: Tensor, outside: Tensor) -> None:
    if index.device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside.any()):
        raise IndexError(f"Target {int(index[outside][0])} is out of bounds.")


def _picked(x: Tensor, place: Tensor, here: Tensor, dim: int) -> Tensor:
    """The value of each token's class; zero where another rank has it."""
    return x.gather(dim, place).squeeze(dim).to(wide(x.dtype)).masked_fill(~here, 0)


def _gather(classes: Classes, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    place, here = _place(given["index"], classes)
    return x.gather(classes.dim, place).masked_fill(~here, 0)


# ---------------------------------------------------------------- kinds of calls


def _logsumexp(classes: Classes, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    out: Tensor = _LogSumExp.apply(x, classes)
    return out if given.get("keepdim") else out.squeeze(classes.dim)


def _log_softmax(classes: Classes, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    out: Tensor = _LogSoftmax.apply(x, classes, dtype)
    return out


def _softmax(classes: Classes, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    out: Tensor = _Softmax.apply(x, classes, dtype)
    return out


_KINDS: dict[str, Callable[[Classes, Tensor, dict[str, Any], torch.dtype], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "gather": _gather,
    "logsumexp": _logsumexp,
    "log_softmax": _log_softmax,
    "softmax": _softmax,
}
