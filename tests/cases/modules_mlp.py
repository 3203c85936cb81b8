"""Small MLPs, experts and linear-like layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.common import floats


class ScaledMLP(nn.Module):
    """K03a: a scalar inside the cut region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.g = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        """b(tanh(a(x)) * g)"""
        return self.b(torch.tanh(self.a(x)) * self.g)


class Experts(nn.Module):
    """K06: a router weight multiplied into four experts; `inside`: before the second matrix, else after it."""

    def __init__(self, *, inside: bool = True, top: int = 4) -> None:
        super().__init__()
        self.inside, self.top = inside, top
        self.router = nn.Linear(16, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, 16, bias=False) for _ in range(4))

    def gates(self, x: Tensor) -> Tensor:
        """Softmax; of the largest `top` only, scaled to one."""
        weights = self.router(x).softmax(-1)
        if self.top == 4:
            return weights
        best, index = weights.topk(self.top, -1)
        return torch.zeros_like(weights).scatter(-1, index, best / best.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all experts."""
        weights = self.gates(x)
        total = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            w = weights[:, i : i + 1]
            hidden = F.silu(up(x))
            total = total + (down(hidden * w) if self.inside else down(hidden) * w)
        return total


class PackedExperts(nn.Module):
    """K06: experts as 3-D parameters, gate and up in one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.gate_up = nn.Parameter(torch.randn(4, 64, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 16, 32) / 5)

    def forward(self, x: Tensor) -> Tensor:
        """Batched products over the experts."""
        weights = self.router(x).softmax(-1)
        gate, up = torch.einsum("nd,ehd->enh", x, self.gate_up).chunk(2, -1)
        hidden = F.silu(gate) * up * weights.t()[:, :, None]
        return torch.einsum("enh,edh->nd", hidden, self.down)


class PackedGate(nn.Module):
    """K09: gate and up in one matrix, one after the other or interleaved."""

    def __init__(self, hidden: int = 32, width: int = 16, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(g) * u)"""
        h = self.gate_up(x)
        g, u = (h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, -1)
        return self.down(F.silu(g) * u)


def _permuted(h: Tensor) -> Tensor:
    return h[..., torch.arange(h.shape[-1], device=h.device).roll(3)]


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "softmax": lambda h: h.softmax(-1),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "flip": lambda h: h.flip(-1),
    "permute": _permuted,
}


class Reduced(nn.Module):
    """K13: something over all hidden features between the two layers."""

    def __init__(self, kind: str, hidden: int = 32) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(16, hidden), nn.Linear(hidden, 16)
        self.between = nn.LayerNorm(hidden) if kind == "module" else None

    def forward(self, x: Tensor) -> Tensor:
        """b(f(a(x)))"""
        h = self.a(x)
        if self.between is not None:
            return self.b(self.between(h))
        if self.kind == "view":
            h = h.view(h.shape[0], -1, 6)
            return self.b(torch.tanh(h + h.sum(1, keepdim=True)).flatten(1))
        return self.b(REDUCTIONS[self.kind](h))


class Residuals(nn.Module):
    """K22: the second block has 37 hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16)) for hidden in (32, 37)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Each added to its input."""
        for block in self.blocks:
            x = x + block(x)
        return x


class Transposed(nn.Module):
    """K35a: a linear layer of one's own with its weight as (in, out)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(fan_in, fan_out) / fan_in**0.5)
        self.b = nn.Parameter(torch.randn(fan_out) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x @ w + b"""
        return x @ self.w + self.b


class MLP(nn.Module):
    """Two layers of any kind around a GELU."""

    def __init__(self, fc: nn.Module, proj: nn.Module) -> None:
        super().__init__()
        self.fc, self.proj = fc, proj

    def forward(self, x: Tensor) -> Tensor:
        """proj(gelu(fc(x)))"""
        return self.proj(F.gelu(self.fc(x)))


class Shared(nn.Module):
    """K35b: one block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(nn.Linear(16, 32), nn.Linear(32, 16))] * 3)

    def forward(self, x: Tensor) -> Tensor:
        """Each added to its input."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class LoRA(nn.Module):
    """K40: a frozen linear layer with an adapter beside it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out)
        self.base.requires_grad_(False)
        self.A = nn.Linear(fan_in, 4, bias=False)
        self.B = nn.Linear(4, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """base(x) + B(A(x))"""
        return self.base(x) + self.B(self.A(x))


class NormedBlocks(nn.Module):
    """K23, K26, K31: pre-norm MLP blocks with residuals."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.mlps = nn.ModuleList(MLP(nn.Linear(16, inner), nn.Linear(inner, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Each block is added to its input."""
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


def noncontiguous() -> MLP:
    """K35c: a weight that is a transposed view."""
    model = MLP(nn.Linear(16, 32), nn.Linear(32, 16))
    model.fc.weight = nn.Parameter((torch.randn(16, 32) / 4).t())
    assert not model.fc.weight.is_contiguous()
    return model


def weight_normed() -> MLP:
    """K35d: both weights parametrised."""
    return MLP(*(parametrizations.weight_norm(layer) for layer in (nn.Linear(16, 32), nn.Linear(32, 16))))


def rows(count: int = 5, width: int = 16) -> Tensor:
    """The input of all of them."""
    return floats(count, width, seed=3)
