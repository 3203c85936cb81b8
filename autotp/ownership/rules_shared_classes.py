"""Losses over classes that are cut (a vocabulary): each rank has its part of the logits, the normaliser is everyone's.

Instead of the logits, a few numbers per token are exchanged. As with the norms that share their statistics, a rule is
about the whole call, because the call is replaced (:mod:`autotp.styles.shared_classes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp import torch_frames
from autotp.ownership.engine import Ownership
from autotp.ownership.nodes import varies
from autotp.ownership.registry import call_rule, find_rule
from autotp.ownership.rules_movement import movement
from autotp.ownership.rules_pointwise import pointwise
from autotp.ownership.state import Owned, Weights
from autotp.record import Call
from autotp.trees import Ref, rebuild

STATISTICS = 3  # of a loss, per token and rank: the largest logit, the sum of exponentials, the target's logit

_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_NAMES: dict[Any, tuple[str, ...]] = {
    F.cross_entropy: _LOSS,
    F.nll_loss: _LOSS[:-1],
    F.log_softmax: ("input", "dim", "_stacklevel", "dtype"),
    F.softmax: ("input", "dim", "_stacklevel", "dtype"),
    **dict.fromkeys(
        (torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax, torch.softmax, torch.Tensor.softmax,
         torch.special.softmax),
        ("input", "dim", "dtype"),
    ),
    **dict.fromkeys((torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp), ("input", "dim", "keepdim")),
    **dict.fromkeys((torch.gather, torch.Tensor.gather), ("input", "dim", "index", "sparse_grad")),
}  # fmt: skip


@dataclass(frozen=True)
class SharedClasses:
    """What is computed over the cut dim ``cut`` of the input.

    ``sent``: how many numbers per token are exchanged, by each rank in the forward and summed in the backward.
    """

    kind: str
    cut: int
    sent: tuple[int, int]


class _Use(NamedTuple):
    """A call as these rules see it: its input, the dim that it runs over, and its other arguments."""

    x: int
    dim: Any
    given: dict[str, Any]
    out: int


def bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of such a call by name; methods call their tensor ``input`` too."""
    named = {("input" if k == "self" else k): v for k, v in kwargs.items()}
    return {**dict(zip(_NAMES[func], args, strict=False)), **named}


def of_probabilities(target: Tensor | torch.dtype) -> bool:
    """Whether targets are probabilities of all classes, not the index of one."""
    return (target if isinstance(target, torch.dtype) else target.dtype).is_floating_point


def class_dim(ndim: int) -> int:
    """Where torch's losses have the classes."""
    return 0 if ndim == 1 else 1


# ---------------------------------------------------------------- losses


@call_rule(F.cross_entropy, F.nll_loss)
def loss(own: Ownership, call: Call) -> bool:
    """Whether the loss runs on cut logits (or log-probabilities); else the rules for its operations decide."""
    use = _use(own, call)
    if use is None or use.given.get("size_average") is not None or use.given.get("reduce") is not None:
        return False
    target, weight = use.given.get("target"), use.given.get("weight")
    if not isinstance(target, Ref) or not _runs_over(own, use, class_dim(len(own.shape(use.x)))):
        return False
    if isinstance(weight, Ref) and (own.owners(weight.tid) is not None or own.open_weights(weight.tid) is not None):
        return False
    probabilities = of_probabilities(own.trace.tensors[target.tid].dtype)
    if probabilities:
        dim = class_dim(len(own.shape(use.x)))
        o, other = own.owners(use.x), own.owners(target.tid)
        if isinstance(own.states.get(target.tid), Weights) or o is None:
            return False
        if other is not None and not own.merge(o, other):
            return False
        _replaced(own, call, use, (2, 1), partial=True)
        own.want(target.tid, "as", {dim: (use.x, dim)})
    elif own.owners(target.tid) is not None:
        return False
    elif call.name == "nll_loss":
        _replaced(own, call, use, (0, 0), partial=True)
        own.want(target.tid)
    else:
        smooth = bool(use.given.get("label_smoothing"))
        _replaced(own, call, use, (STATISTICS + smooth, 0))
        own.want(target.tid)
    if isinstance(weight, Ref):
        own.want(weight.tid)
    return True


@call_rule(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(own: Ownership, call: Call) -> bool:
    """Whether a normaliser is made of everyone's part."""
    use = _use(own, call)
    if use is None or not _runs_over(own, use, use.dim):
        return False
    _replaced(own, call, use, (1, 0))
    return True


@call_rule(torch.gather, torch.Tensor.gather)
def gather(own: Ownership, call: Call) -> bool:
    """Whether the rank that has a class gives its value: the others give zeros."""
    use = _use(own, call)
    index = use.given.get("index") if use is not None else None
    if use is None or not isinstance(index, Ref) or own.owners(index.tid) is not None:
        return False
    if use.given.get("sparse_grad") or not _runs_over(own, use, use.dim) or not _fewer(own, use):
        return False
    _replaced(own, call, use, (0, 0), partial=True)
    own.want(index.tid)
    return True


@call_rule(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax, F.softmax,
           torch.softmax, torch.Tensor.softmax, torch.special.softmax)  # fmt: skip
def softmax(own: Ownership, call: Call) -> bool:
    """Whether probabilities stay cut: only where all that is made of them sums over the classes, or picks some."""
    use = _use(own, call)
    if use is None or not _runs_over(own, use, use.dim):
        return False
    if not own.reach.ends_in(use.out, call.stop - 1, _SUMMED):
        return False
    o = own.owners(use.x)
    assert o is not None
    _replaced(own, call, use, (2, 1))
    own.states[use.out] = Owned(own.nodes.canonical(o))
    return True


_SUMMED = {"nll_loss_forward", "nll_loss2d_forward", "gather", "sum", "mean", "logsumexp"}


# ---------------------------------------------------------------- shared by them


def _use(own: Ownership, call: Call) -> _Use | None:
    """The call, if it is one that a rank can do otherwise: on a cut float tensor, in the model's own code."""
    args, kwargs = rebuild(call.leaves, call.spec)
    given = bound(call.func, args, kwargs)
    x = given.get("input")
    outs = [o.tid for o in call.outs if isinstance(o, Ref)]
    if not isinstance(x, Ref) or len(call.outs) != 1 or len(outs) != 1 or call.module < 0:
        return None
    if torch_frames.in_checkpoint(call.site):  # it would be recomputed where it cannot be replaced
        return None
    if not isinstance(own.states.get(x.tid), Owned) or not own.trace.tensors[x.tid].dtype.is_floating_point:
        return None
    return _Use(x.tid, given.get("dim"), given, outs[0])


def _runs_over(own: Ownership, use: _Use, dim: Any) -> bool:
    """Whether the input is cut along this dim and no other, and the classes are more than what is exchanged of them."""
    o = own.owners(use.x)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if o is None or own.by_tokens(o) or not isinstance(dim, int) or isinstance(dim, bool):
        return False
    cut = [d for d in range(o.ndim) if varies(o, d)]
    return cut == [dim % o.ndim] and o.shape[cut[0]] > STATISTICS * own.tp


def _fewer(own: Ownership, use: _Use) -> bool:
    """Whether fewer elements are picked than there are."""
    return own.shape(use.out)[use.dim] * STATISTICS <= own.shape(use.x)[use.dim]


def _replaced(own: Ownership, call: Call, use: _Use, sent: tuple[int, int], partial: bool = False) -> None:
    """Take note that the call is replaced; its result is whole, or a sum over the ranks that is still to be made."""
    o = own.owners(use.x)
    assert o is not None
    cut = next(d for d in range(o.ndim) if varies(o, d))
    own.at = call.stop - 1
    own.shared[call.index] = SharedClasses(call.name, cut, sent), use.x
    own.classed.append((call.name, own.nodes.distinct(o)))
    own.fed |= _made_from(own, use.x)
    own.want(use.x, "own")
    for i in range(call.start, call.stop):
        for t in own.trace.ops[i].outs:
            own.states[t] = None
    if partial:
        own.partial[use.out] = -1


def _made_from(own: Ownership, tid: int) -> set[int]:
    """The cut tensors that logits were made from by moving or changing single elements."""
    found, waiting = set[int](), [tid]
    while waiting:
        t = waiting.pop()
        op = own.made_by.get(t)
        if t in found or not isinstance(own.states.get(t), Owned):
            continue
        found.add(t)
        if op is not None and not op.writes and find_rule(op) in _ELEMENTWISE:
            waiting += op.ins
    return found


_ELEMENTWISE: tuple[Callable[..., None], ...] = (movement, pointwise)
