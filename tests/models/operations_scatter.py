"""Writes by index: what is cut along a dim that the index does not touch stays cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.operations import Case, linear, weight

TWO = {"a": linear(16, 32), "b": linear(32, 16)}
# rows 1 and 3 of four, an index for every element, a mask of rows
ROWS = {**TWO, "rows": lambda: torch.tensor([1, 3]), "mask": lambda: torch.tensor([True, False, True, True])}


def _hidden(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.a(x))


def _index_of(h: Tensor, dim: int) -> Tensor:
    """An index for every element, along a dim: its places backwards."""
    shape = [1] * h.dim()
    shape[dim] = h.shape[dim]
    return torch.arange(h.shape[dim] - 1, -1, -1).view(shape).expand(h.shape)


def _index_add(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(h.index_add(0, m.rows, h[:2] * 3, alpha=2.0))


def _index_put(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(h.index_put((m.rows,), h[:2] * 3, accumulate=True))


def _index_put_apart(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x).unsqueeze(3).repeat(1, 1, 1, 2).transpose(1, 2).contiguous()  # rows, features, places, copies
    h[m.rows, :, :, m.rows * 0] = h[:2, :, :, 1].exp()
    return m.b(h.sum(3).transpose(1, 2))


def _set_rows(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x).clone()
    h[m.rows] = h[:2] * 3
    return m.b(h)


def _set_masked(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x).clone()
    h[m.mask] = m.token
    return m.b(h)


def _scatter(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(h.scatter(1, _index_of(h, 1), h * 3))


def _scatter_add(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(torch.zeros_like(h).scatter_add_(1, _index_of(h, 1) // 2, h.exp()))


def _scatter_onto_whole(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(torch.zeros(4, 6, 32, dtype=h.dtype).scatter_reduce(1, _index_of(h, 1) // 2, h, "sum") * h)


def _slices(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    h = h.slice_scatter(h[:, :2] * 3, 1, 2, 4).select_scatter(h[0].exp(), 0, 2)
    return m.b(h.index_fill(0, m.rows[:1], 0.5).index_copy(0, m.rows, h[2:].sin()))


def _masked(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(h.masked_scatter(m.mask[:, None, None].expand(h.shape), h[:3].exp()))


def _parts(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x).clone()
    h[:, 0] = 0.5
    h[:, 1:3] *= 2
    h[1, ..., 4, :] = h[0, 5].detach()
    h[:, -1].mul_(3)
    return m.b(h)


def _weights_scaled(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.b.weight.mul_(1.5)
    return m.b(_hidden(m, x))


def _touched(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(h.index_add(2, m.rows, h[..., :2]))


def _nothing(m: Any, x: Tensor) -> Tensor:
    """As caches of heads without values are filled: four cut heads of no features."""
    h = _hidden(m, x)
    empty = h.unflatten(-1, (4, 8))[..., :0]
    kept = torch.zeros(empty.shape, dtype=h.dtype).index_copy_(1, m.rows, empty[:, :2])
    return m.b(h) + kept.sum()


SCATTER = {
    "index_add": Case(forward=_index_add, parts=ROWS),
    "index_put": Case(forward=_index_put, parts=ROWS),
    "index_put of two dims apart": Case(forward=_index_put_apart, parts=ROWS),
    "rows set by index": Case(forward=_set_rows, parts=ROWS),
    "rows set by mask": Case(forward=_set_masked, parts={**ROWS, "token": weight(32)}, cut=("a.weight", "token")),
    "scatter": Case(forward=_scatter, parts=TWO),
    "scatter_add": Case(forward=_scatter_add, parts=TWO),
    "scatter onto a whole tensor": Case(forward=_scatter_onto_whole, parts=TWO),
    "slice_scatter and others": Case(forward=_slices, parts=ROWS),
    "masked_scatter": Case(forward=_masked, parts=ROWS),
    "parts set": Case(forward=_parts, parts=TWO),
    "weights scaled in place": Case(
        forward=_weights_scaled, parts=TWO, styles={"a.weight": "colwise", "b.weight": "rowwise"}
    ),
    "nothing set in a whole tensor": Case(forward=_nothing, parts=ROWS, gathers=1),
    "along the cut dim": Case(forward=_touched, parts=ROWS, gathers=2),
}
