"""A random module from a short text-like description, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.property import layers  # noqa: F401  (registers its pieces)
from tests.property.pieces import ONE, TWO, WIDTH

BATCH, TIME = 2, 3


@dataclass(frozen=True)
class Line:
    """One piece: its name and variant, and how far back its operands are. ``share``: the module of an earlier line."""

    piece: str
    variant: int
    x: int = 1
    y: int = 2
    share: bool = False


class Program(nn.Module):
    """Runs its lines in order; gives the last value and the mean of all others."""

    def __init__(self, lines: tuple[Line, ...]) -> None:
        super().__init__()
        self.lines = lines
        self.steps = nn.ModuleList()
        self.plain: list[Any] = []
        for line in lines:
            made = self._shared(line) or (ONE.get(line.piece) or TWO[line.piece])(line.variant)
            module = made if isinstance(made, nn.Module) else None
            self.steps.append(module if module is not None else nn.Identity())
            self.plain.append(None if module is not None else made)
        self.head = nn.Linear(WIDTH, WIDTH)

    def _shared(self, line: Line) -> Any:
        alike = [i for i, earlier in enumerate(self.lines[: len(self.steps)]) if earlier.piece == line.piece]
        return self.steps[alike[-1]] if line.share and alike and self.plain[alike[-1]] is None else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x]
        for line, module, plain in zip(self.lines, self.steps, self.plain, strict=True):
            step = module if plain is None else plain
            operands = [values[-min(line.x, len(values))]]
            if line.piece in TWO:
                operands.append(values[-min(line.y, len(values))])
            values.append(step(*operands))
        return self.head(values[-1]), torch.stack(values).mean(0)


def build(lines: tuple[Line, ...]) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module, with every value random, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Program(lines)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        return model, (torch.randn(BATCH, TIME, WIDTH),), {}
