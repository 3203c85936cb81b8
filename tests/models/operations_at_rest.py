"""Weights that nothing lets be cut in use: they are kept in parts and put together where they are read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.operations import Case, linear, weight

REST = "gathered_at_use"


class Doubled(torch.autograd.Function):
    """A product whose gradient only its author knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Twice ``x @ w``."""
        ctx.save_for_backward(x, w)
        return x @ w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """As for a product."""
        x, w = ctx.saved_tensors
        return grad @ w.t() * 2, x.flatten(0, 1).t() @ grad.flatten(0, 1) * 2


def _recurrent(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.r(m.a(x))[0]))


def _cells(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    state = torch.zeros(h.shape[1], 8, dtype=h.dtype)
    for step in h:
        state = m.r(step, state)
    return m.b(state)


def _per_head(m: Any, x: Tensor) -> Tensor:
    return m.b((m.a(x).unflatten(-1, (8, 4)) @ (m.w * 2).sinh()).flatten(-2))


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(Doubled.apply(x, m.w))) + F.pdist(m.w).sum())


def _distances(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(x)) + F.pdist(m.w).sum())


def _elsewhere(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(x)) + F.pdist(m.c.weight).sum())


def _look_up(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(m.e((x[..., 0] > 0).long() + 3))))


TWO = {"a": linear(16, 32), "b": linear(32, 16)}
PLAIN = {"a.weight": "colwise", "b.weight": "rowwise"}


def _names(layers: int, both: bool) -> dict[str, str]:
    ends = ("", "_reverse") if both else ("",)
    return {f"r.weight_{k}h_l{i}{e}": REST for i in range(layers) for k in "ih" for e in ends}


def recurrent(kind: type[nn.RNNBase], layers: int = 1, both: bool = False, **options: Any) -> Case:
    """A recurrent layer between two linear ones."""
    styles = _names(layers, both)
    made = {"a": linear(16, 12), "r": lambda: kind(12, 8, layers, bidirectional=both, **options)}
    return Case(
        forward=_recurrent, parts={**made, "b": linear(16 if both else 8, 16)}, styles=styles, gathers=2 + len(styles)
    )


AT_REST = {
    "LSTM": recurrent(nn.LSTM, layers=2, both=True, batch_first=True),
    "LSTM without biases": recurrent(nn.LSTM, bias=False),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN, layers=2),
    "GRU cell": Case(
        forward=_cells, parts={"a": linear(16, 12), "r": lambda: nn.GRUCell(12, 8), "b": linear(8, 16)}, gathers=13,
        styles={"r.weight_ih": REST, "r.weight_hh": REST},
    ),
    "matrix shared by all heads": Case(
        forward=_per_head, parts={**TWO, "w": weight(4, 4)}, styles={**PLAIN, "w": REST}, gathers=1
    ),
    "custom function and an operation without rule": Case(
        forward=_twice, parts={**TWO, "w": weight(16, 16)}, styles={**PLAIN, "w": REST}, gathers=1
    ),
    "uneven": Case(
        forward=_distances, parts={"a": linear(15, 32), "b": linear(32, 16), "w": weight(7, 15)}, x=(4, 6, 15),
        styles={**PLAIN, "w": REST}, gathers=1, tp=(2, 4),
    ),
    "weight of another module": Case(
        forward=_elsewhere, parts={**TWO, "c": linear(16, 16)}, styles={**PLAIN, "c.weight": REST}, gathers=1
    ),
    "written by its look-up": Case(
        forward=_look_up, parts={**TWO, "e": lambda: nn.Embedding(6, 16, max_norm=1.0)},
        styles={"e.weight": "replicate"},
    ),
}  # fmt: skip
