"""Custom autograd functions between two layers: cut where trying them shows that they may be, whole where not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autotp
from tests.models.functions import Both, Gated, Gelu, MeanBack, Norm, Reversed, Rounded, RowQuantised, Slope, Softmax
from tests.models.operations import Case, linear, weight

TWO = {"a": linear(16, 32), "b": linear(32, 16)}
PAIR = {"a.weight": "colwise", "b.weight": "rowwise"}
GATHERED = {"a.weight": "colwise_gather_output"}


class ByValue(torch.autograd.Function):
    """Reads a number from a tensor, so that it is not tried unasked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        """Scaled, if there is anything to do."""
        ctx.scale = scale.item()
        return x * ctx.scale if ctx.scale != 1 else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Scaled as well."""
        return grad * ctx.scale, None


autotp.register_rule(ByValue, "..., one -> ...; cut ...")
gelu = Gelu.apply  # as models keep it


class Leaky(nn.Module):
    """An activation with a weight of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.rand(shape) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Leaky."""
        return Slope.apply(x, self.slope)


def _heads(m: Any, x: Tensor) -> Tensor:
    q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (m.a, m.k))
    return m.b((Softmax.apply(q @ k.mT) @ k).transpose(1, 2).flatten(2))


def _both(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(Both.apply(h)[0] + Both.apply(h)[1] * sum(Both.apply(h * 2)))


FUNCTIONS = {
    "function, element by element": Case(
        forward=lambda m, x: m.b(Gelu.apply(m.a(x))), parts=TWO, styles=PAIR, tp=(2, 4)
    ),
    "function, its apply kept": Case(forward=lambda m, x: m.b(gelu(m.a(x))), parts=TWO, styles=PAIR),
    "function, gated": Case(
        forward=lambda m, x: m.b(Gated.apply(m.a(x), m.g(x))), parts={**TWO, "g": linear(16, 32)}, tp=(2, 4),
        styles={**PAIR, "g.weight": "colwise"},
    ),
    "function, straight through": Case(
        forward=lambda m, x: m.b(Rounded.apply(m.a(x), 8, 0.5)), parts=TWO, styles=PAIR, tp=(2, 4)
    ),
    "function, turned around": Case(
        forward=lambda m, x: m.b(Reversed.apply(m.a(x), 0.5)), parts=TWO, styles=PAIR
    ),
    "function, learnt slope": Case(
        forward=lambda m, x: m.b(m.act(m.a(x))), parts={**TWO, "act": Leaky},
        styles={**PAIR, "act.slope": "replicated_with_grad_allreduce"},
    ),
    "function, two results": Case(forward=_both, parts=TWO, styles=PAIR),
    "function, attention scores": Case(
        forward=_heads, parts={**TWO, "k": linear(16, 32)}, styles={**PAIR, "k.weight": "colwise"}
    ),
    "function, of weights by rows": Case(
        forward=lambda m, x: m.b(m.a(x).tanh() @ RowQuantised.apply(m.w).t()), parts={**TWO, "w": weight(32, 32)},
        styles={"w": "colwise", "b.weight": "rowwise"}, gathers=1,
    ),
    "function, declared": Case(
        forward=lambda m, x: m.b(ByValue.apply(m.a(x), m.scale)), styles=PAIR,
        parts={**TWO, "scale": lambda: torch.tensor([3.0])},
    ),
    "function, softmax over features": Case(
        forward=lambda m, x: m.b(Softmax.apply(m.a(x))), parts=TWO, styles=GATHERED, gathers=2
    ),
    "function, norm over features": Case(
        forward=lambda m, x: m.b(Norm.apply(m.a(x))), parts=TWO, styles=GATHERED, gathers=2, tp=(4,)
    ),
    "function, features mixed in the backward": Case(
        forward=lambda m, x: m.b(MeanBack.apply(m.a(x))), parts=TWO, styles=GATHERED, gathers=2, tp=(2, 4)
    ),
}  # fmt: skip
