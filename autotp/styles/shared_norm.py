"""Layer, RMS and group norms of which this rank has some of the features.

The ranks exchange the mean and the variance of their parts (or the mean square), a few numbers per token. Forward: one
collective; backward: one more, for what each rank's features say of the common statistics.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autotp.call_edits import Indices, SharedEdit
from autotp.ownership.rules_shared_norm import SharedNorm
from autotp.styles.comm import Ranks, enter, gather, leave
from autotp.styles.result_types import result_dtype, wide

_NAMES = {
    "layer": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms": ("input", "normalized_shape", "weight", "eps"),
    "group": ("input", "num_groups", "weight", "bias", "eps"),
}


def shared_norm(edit: SharedEdit, func: Any, args: Any, kwargs: Any, ranks: Ranks) -> Tensor:
    """What ``func`` makes of the whole input, at this rank's features."""
    norm = edit.what
    assert isinstance(norm, SharedNorm)
    kind = norm.kind
    given = {**dict(zip(_NAMES[kind], args, strict=False)), **kwargs}
    x, weight, bias, eps = given["input"], given.get("weight"), given.get("bias"), given.get("eps")
    h = x.to(wide(x.dtype))
    if eps is None:
        eps = torch.finfo(h.dtype).eps if kind == "rms" else 1e-5
    if kind == "group":
        y = _group(norm, edit.parts, h, eps, ranks)
        weight, bias = (None if p is None else p.view(-1, *[1] * (x.ndim - 2)) for p in (weight, bias))
    else:
        y = _features(norm, edit.parts, h, eps, ranks)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(result_dtype(func, kind, x, weight))


def _features(norm: SharedNorm, parts: Indices, x: Tensor, eps: float, ranks: Ranks) -> Tensor:
    """Statistics over the last dims, one of which is cut."""
    dims = list(range(x.ndim - norm.over, x.ndim))
    shares = [len(p) for p in parts]
    if norm.kind == "rms":
        size = math.prod(x.shape[d] for d in dims) // max(shares[ranks.rank], 1) * sum(shares)
        squares = enter(leave(x.pow(2).sum(dims, keepdim=True), ranks), ranks)
        return x * torch.rsqrt(squares / size + eps)
    mean = x.mean(dims, keepdim=True)
    spread = (x - mean).pow(2).mean(dims, keepdim=True)
    weights = x.new_tensor(shares).view(-1, *[1] * x.ndim) / sum(shares)
    mean, spread = _combined(mean, spread, weights, ranks)
    return (x - mean) * torch.rsqrt(spread + eps)


def _group(norm: SharedNorm, parts: Indices, x: Tensor, eps: float, ranks: Ranks) -> Tensor:
    """Statistics per group of channels; a rank may have some channels of a group, or none."""
    n, groups = x.shape[:2], norm.over
    per_group = sum(len(p) for p in parts) // groups
    of = [torch.tensor([c // per_group for c in p], device=x.device, dtype=torch.int64) for p in parts]
    mine = of[ranks.rank]
    counts = torch.stack([torch.bincount(o, minlength=groups) for o in of]).to(x.dtype)
    own = counts[ranks.rank].clamp(min=1)
    flat = x.reshape(*n, -1)
    into = x.new_zeros(n[0], groups)
    mean = into.index_add(1, mine, flat.mean(2)) / own
    spread = into.index_add(1, mine, (flat - mean[:, mine, None]).pow(2).mean(2)) / own
    mean, spread = _combined(mean, spread, (counts / per_group).unsqueeze(1), ranks)
    return ((flat - mean[:, mine, None]) * torch.rsqrt(spread[:, mine, None] + eps)).view(x.shape)


def _combined(mean: Tensor, spread: Tensor, weights: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Mean and variance of everything from those of every rank's part; ``weights[rank]`` is its share of it."""
    parts = tuple(range(r, r + 1) for r in range(ranks.size))
    stats = enter(gather(torch.stack([mean, spread]).unsqueeze(0), ((0, parts),), ranks), ranks)
    means, spreads = stats[:, 0], stats[:, 1]
    total = (weights * means).sum(0)
    return total, (weights * (spreads + (means - total).pow(2))).sum(0)
