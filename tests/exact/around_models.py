"""Small models for what people put around a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.exact.compile_models import Block, Feed, Stack
from tests.models.common import Built, floats

WIDTH = 16


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, sized by what the layer says of itself."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        return self.base(x) + self.b(self.a(x))


class MLP(nn.Module):
    """Up, act, down, then a head by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(x + self.down(F.gelu(self.up(x))))


class Headed(nn.Module):
    """A head that takes and gives whole tensors, after an MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Feed(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(x + self.body(x))


class Gathered(nn.Module):
    """q, k and v read one input; v is gathered at once, so its output is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Something like attention."""
        x = x.sigmoid()
        return self.out(torch.tanh(self.q(x) * self.k(x))) + self.v(x).softmax(-1)


class InModule(nn.Module):
    """Checkpoints a part of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        self.b = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x @ self.a) @ self.b)

    def forward(self, x: Tensor) -> Tensor:
        """An MLP."""
        return checkpoint(self._inside, x, use_reentrant=False)


def of(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    """One module on floats."""
    return lambda: (make(), (floats(2, 6, WIDTH),), {})


def adapted_before() -> nn.Module:
    """Adapters on both layers of the MLP and on its head."""
    model = MLP()
    model.up, model.down, model.head = Adapted(model.up), Adapted(model.down), Adapted(model.head)
    return model


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": of(MLP),
    "headed": of(Headed),
    "adapted": of(adapted_before),
    "gathered": of(Gathered),
    "in_module": of(InModule),
    "stack": of(lambda: Stack([Block() for _ in range(3)])),
    "dropout": of(lambda: Stack([Block(dropout=0.3) for _ in range(3)])),
}
