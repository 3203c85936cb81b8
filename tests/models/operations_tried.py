"""Operations cut as running them has shown, and two of torchvision with rules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import autotp
from tests.models.operations import Case, conv, linear, weight
from tests.models.operations_taught import defined

TWO = {"a": linear(16, 32), "b": linear(32, 16)}
IMAGE = {"a": conv(3, 16), "b": conv(16, 4)}
PAIR = {"a.weight": "colwise", "b.weight": "rowwise"}


def _smoothed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x.mT, w.unsqueeze(1), padding=1, groups=x.shape[-1]).mT.tanh()


def smooth(x: Tensor, w: Tensor) -> Tensor:
    """Features filtered over time, each by its own filter."""
    return _smoothed(x, w)


SMOOTH = defined("smooth", smooth, _smoothed)
autotp.register_rule(SMOOTH)


def _segments(m: Any, x: Tensor) -> Tensor:
    sums = torch.segment_reduce(m.a(x).tanh(), "mean", lengths=torch.tensor([2, 1, 3]), axis=0)
    return m.b(sums)


def _boxes(m: Any, x: Tensor) -> Tensor:
    corners = torch.tensor([[0, 0.0, 0.0, 5.0, 5.0], [1, 1.0, 1.0, 7.0, 6.0]], dtype=x.dtype)
    h = m.a(x).tanh()
    return m.b(torchvision.ops.roi_align(h, corners, 3) + torchvision.ops.roi_pool(h, corners, 3))


class Deformed(nn.Module):
    """A deformable convolution with its offsets and mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torchvision.ops.DeformConv2d(3, 16, 3, padding=1)
        self.offset, self.mask = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(3, 9, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Shifted by what the image says."""
        return self.conv(x, self.offset(x), self.mask(x).sigmoid())


TRIED = {
    "segments": Case(forward=_segments, parts=TWO, x=(6, 16), styles=PAIR),
    "smoothing, asked for": Case(
        forward=lambda m, x: m.b(SMOOTH(m.a(x), m.w)), parts={**TWO, "w": weight(32, 3)},
        cut=("a.weight", "b.weight", "w"), styles=PAIR, tp=(2, 4),
    ),
    "boxes": Case(forward=_boxes, parts=IMAGE, x=(2, 3, 8, 8), styles=PAIR),
    "deformed convolution": Case(
        forward=lambda m, x: m.b(m.a(x).relu()), parts={"a": Deformed, "b": conv(16, 4)}, x=(2, 3, 8, 8), gathers=2,
        cut=("a.conv.weight", "b.weight"), styles={"a.conv.weight": "colwise", "b.weight": "rowwise"},
    ),
}  # fmt: skip
