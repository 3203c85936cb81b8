"""A rank's own random numbers in compiled code.

There the generator cannot be set aside for one call. Instead a seed is drawn, the same on all ranks, and the numbers
are computed from it, the rank and the place of an element: an integer hash, which a compiler fuses like any other
elementwise operation, and which recomputes the same in an activation checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotp import torch_dynamo
from autotp.styles.comm import Ranks
from autotp.torch_dynamo import at_trace

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that leaves no pattern; the factors keep products below 2**63."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def _kept(shape: Sequence[int], p: float, ranks: Ranks, like: Tensor) -> Tensor:
    """True with probability 1 - p, for each element by itself, otherwise on every rank."""
    seed = torch.randint(0, 2**31, (2,), device=like.device)
    places = torch.arange(math.prod(shape), device=like.device)
    words = _mixed(_mixed((places + seed[0]) & _WORD) ^ ((seed[1] + ranks.rank * _GOLDEN) & _WORD))
    return (words >= int(p * 2**32)).view(shape)


def _dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    return torch.where(kept, x, 0.0) * (1.0 / (1.0 - p) if p < 1 else 0.0)


def _dropout(ranks: Ranks, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    out = _dropped(input, _kept(input.shape, p, ranks, input), p)
    return input.copy_(out) if inplace else out


def _dropout_channels(
    ranks: Ranks, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    shape = (*input.shape[:2], *([1] * (input.ndim - 2)))
    out = _dropped(input, _kept(shape, p, ranks, input), p)
    return input.copy_(out) if inplace else out


def _attention(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention written out, as the kernels would draw for themselves."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return _dropped(weights, _kept(weights.shape, dropout_p, ranks, weights), dropout_p) @ value


_KNOWN: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "dropout1d": _dropout_channels,
    "dropout2d": _dropout_channels,
    "dropout3d": _dropout_channels,
    "scaled_dot_product_attention": _attention,
}
_BATCHED = {"dropout1d": 3, "dropout2d": 4, "dropout3d": 5}


@at_trace
def _name(func: Any, ndim: int) -> str:
    name = getattr(func, "__name__", str(func))
    if name not in _KNOWN or ndim != _BATCHED.get(name, ndim):
        raise torch_dynamo.refused(
            f"{name} draws random numbers for a rank's part of a tensor, which is not known in a form for the compiler"
        )
    return name


def own(func: Any, args: Any, kwargs: Any, ranks: Ranks) -> Tensor:
    """A random function with numbers of this rank's own, traced."""
    return _KNOWN[_name(func, args[0].ndim if args else 0)](ranks, *args, **kwargs)
