"""A model whose ``generate`` calls methods of its modules, which read parameters outside of any forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Reader(nn.Module):
    """Has a vector and a matrix of its own, besides layers."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.queries = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(4, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def read(self, x: Tensor) -> Tensor:
        """[batch, any, WIDTH] -> with the vector and the matrix put behind."""
        line, queries = self.line.expand(len(x), 1, -1), self.queries.cumsum(0).expand(len(x), -1, -1)
        return torch.cat([x, line, queries], dim=1)

    def forward(self, x: Tensor, put_behind: bool = True) -> Tensor:
        """[batch, any, WIDTH] -> [batch, any (and 5), WIDTH]."""
        return self.down(torch.relu(self.up(self.read(x) if put_behind else x)))  # type: ignore[no-any-return]


class CallsMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader, self.head = Reader(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, any, WIDTH] -> [batch, any + 5, WIDTH]."""
        return self.head(self.reader(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """By a method first, then by forwards."""
        seen = self.reader.read(x)
        for _ in range(3):
            seen = self.head(self.reader(seen, put_behind=False) + self.reader(seen)[:, : seen.shape[1]])
        return seen
