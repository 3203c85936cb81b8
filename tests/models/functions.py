"""Custom autograd functions: those that treat features apart, and those that hide that they do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Gelu(Function):
    """An activation with a backward of its own, as BLOOM has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As ``gelu`` with tanh."""
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its derivative."""
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return grad * (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t))


class Gated(Function):
    """``silu(a) * b``, with what the backward needs computed again."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """Without a context."""
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """What is kept."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """To those of the two that want it."""
        a, b = ctx.saved_tensors
        s = a.sigmoid()
        da = grad * b * s * (1 + a * (1 - s)) if ctx.needs_input_grad[0] else None
        return da, grad * a * s if ctx.needs_input_grad[1] else None


class Rounded(Function):
    """Straight-through rounding, where the gradient is cut off outside of a range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int, most: float) -> Tensor:
        """To multiples of ``1 / steps``."""
        ctx.save_for_backward(x.abs() <= most)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """As if it had not been rounded."""
        return torch.where(ctx.saved_tensors[0], grad, 0.0), None, None


class Reversed(Function):
    """Hands its input back; its gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        """As it is."""
        ctx.by = by
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Against it."""
        return -ctx.by * grad, None


class Slope(Function):
    """A leaky activation with one slope for all features, which is learnt."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
        """Steeper or less steep below zero."""
        ctx.save_for_backward(x, slope)
        return torch.where(x > 0, x, x * slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The slope's gradient is a sum over everything."""
        x, slope = ctx.saved_tensors
        below = torch.where(x > 0, 0.0, x * grad).sum()
        return torch.where(x > 0, grad, grad * slope), below.view(slope.shape)


class Both(Function):
    """Two results; none, or one, may have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sine and cosine."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, s: Tensor | None, c: Tensor | None) -> Tensor | None:
        """Of what came in."""
        (x,) = ctx.saved_tensors
        parts = [g * f for g, f in ((s, x.cos()), (c, -x.sin())) if g is not None]
        return sum(parts[1:], parts[0]) if parts else None


class Softmax(Function):
    """A softmax over the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Along features."""
        y = (x - x.amax(-1, keepdim=True)).exp()
        y = y / y.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its derivative."""
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class Norm(Function):
    """A layer norm without weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Along features."""
        d = x - x.mean(-1, keepdim=True)
        scale = (d.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(d * scale, scale)
        return d * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its derivative."""
        y, scale = ctx.saved_tensors
        return scale * (grad - grad.mean(-1, keepdim=True) - y * (grad * y).mean(-1, keepdim=True))


class MeanBack(Function):
    """Element by element forward; of the gradient, the mean over the features is taken out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Nothing that mixes features."""
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """What mixes them."""
        return grad - grad.mean(-1, keepdim=True)


class RowQuantised(Function):
    """Rounded to a few steps of each row's largest number; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        """Of a weight, row by row."""
        step = w.abs().amax(1, keepdim=True).clamp(min=1e-6) / 7
        return (w / step).round() * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """As it is."""
        return grad
