"""Values that operations are tried on, gradients that come in, and ways to deal indices out. All are seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autotp.ownership.claims import Slot, Trial

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _normal(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _spike(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    x = _normal(shape, g) * 0.1
    if x.numel():
        x.view(-1)[int(torch.randint(x.numel(), (), generator=g))] = 1e4
    return x


DRAWS: tuple[Draw, ...] = (
    _normal,
    lambda s, g: torch.rand(s, generator=g, dtype=torch.float64) * 0.9 + 0.05,
    lambda s, g: _normal(s, g) * 30,
    lambda s, g: torch.randint(-2, 3, s, generator=g).double(),
    lambda s, g: _normal(s, g).clamp(min=0) * 5,
    lambda s, g: -torch.rand(s, generator=g, dtype=torch.float64) * 3,
    _spike,
    lambda s, g: _normal(s, g) * 1e-6,
    lambda s, g: torch.zeros(s, dtype=torch.float64),
)

HUGE = 1e8  # of gradients, which a loss may be scaled by
SPIKE = DRAWS.index(_spike)
OTHERS = (0, 2, 3)  # the draws for other sizes than the model's


def drawn_all(t: Trial, size: int | None, k: int, wide: bool) -> list[Tensor]:
    """Draw ``k`` of all operands, with the dim in question of this size (None: as recorded)."""
    g = torch.Generator().manual_seed(1000 * (size or 0) + k)
    shapes = [
        tuple(size if i == d and size is not None else n for i, n in enumerate(s.shape))
        for s, d in zip(t.slots, t.dims, strict=True)
    ]
    low = min((n for shape in shapes for n in shape if n > 1), default=1)
    return [_drawn(s, shape, k, g, wide, low) for s, shape in zip(t.slots, shapes, strict=True)]


def _drawn(s: Slot, shape: tuple[int, ...], k: int, g: torch.Generator, wide: bool, low: int) -> Tensor:
    if s.dtype.is_floating_point:
        x = DRAWS[k](shape, g)
        return x if wide else x.to(s.dtype)
    if s.dtype.is_complex:
        x = torch.complex(DRAWS[k](shape, g), DRAWS[k](shape, g))
        return x if wide else x.to(s.dtype)
    if s.dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if s.content is not None and shape == s.shape and k % 2:
        return s.content.clone()
    return torch.randint(0, low, shape, generator=g).to(s.dtype)


def divisions(size: int, g: torch.Generator) -> Iterator[list[Tensor]]:
    """Ways to deal indices out: halves, and shares at random, kept in order as ranks keep theirs."""
    if size < 2:
        return
    indices = torch.arange(size)
    yield [indices[: size // 2], indices[size // 2 :]]
    if size > 2:
        few = max(1, size // 8)
        yield [indices[:few], indices[few:]]
        taken = torch.zeros(size, dtype=torch.bool)
        taken[torch.randperm(size, generator=g)[: max(1, size // 3)]] = True
        yield [indices[taken], indices[~taken]]
        yield [indices[i :: min(size, 4)] for i in range(min(size, 4))]


def incoming(whole: list[Any], k: int) -> list[dict[int, Tensor]]:
    """The gradients to try: ordinary ones, those of another draw, and for one result of several alone."""
    asked = [j for j, y in enumerate(whole) if isinstance(y, Tensor) and y.requires_grad]
    if not asked:
        return [{}]
    g = torch.Generator().manual_seed(5)
    draws = (_normal, DRAWS[(k + SPIKE) % len(DRAWS)])
    of = [{j: draw(tuple(whole[j].shape), g).to(whole[j].dtype) for j in asked} for draw in draws]
    of += [{j: w * HUGE for j, w in of[0].items()}] if not k else []
    return of + [{j: of[0][j]} for j in asked if len(asked) > 1 and not k]


__all__ = ["DRAWS", "OTHERS", "divisions", "drawn_all", "incoming"]
