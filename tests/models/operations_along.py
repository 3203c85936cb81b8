"""Operations that leave dims alone, along which their operands stay cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.operations import Case, conv, linear, noisy, weight

TWO = {"a": linear(16, 32), "b": linear(32, 16)}
IMAGE = {"a": conv(3, 16), "b": conv(16, 4)}
PAIR = {"a.weight": "colwise", "b.weight": "rowwise"}
Change = Callable[[Tensor], Tensor]


def between(change: Change, **options: Any) -> Case:
    """An operation between two linear layers, on (4, 6, 32)."""
    return Case(forward=lambda m, x: m.b(change(m.a(x).tanh())), parts=TWO, styles=PAIR, **options)


def image(change: Change, **options: Any) -> Case:
    """An operation between two convolutions, on images of 16 channels."""
    parts = {**IMAGE, **options.pop("parts", {})}
    return Case(forward=lambda m, x: m.b(change(m.a(x).tanh())), parts=parts, x=(2, 3, 8, 8), styles=PAIR, **options)


def matrices(change: Change) -> Case:
    """An operation on a 3 x 3 matrix per feature: positive definite, and cut by the batch that the features are."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).tanh()  # 4, 9, 32
        square = h.movedim(-1, 0).unflatten(-1, (3, 3))  # 32, 4, 3, 3
        square = square @ square.mT + torch.eye(3, dtype=h.dtype)
        return m.b(change(square).flatten(2).movedim(0, -1))

    return Case(forward=forward, parts=TWO, x=(4, 9, 16), styles=PAIR)


def _transforms(h: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(h, dim=(0, 1), norm="ortho")
    again = torch.fft.irfft2(spectrum * torch.exp(-spectrum.abs()), s=(4, 6), dim=(0, 1), norm="ortho")
    return again + torch.fft.fft(h, dim=1).real


def _filtered(m: Any, x: Tensor) -> Tensor:
    h = torch.fft.rfft2(m.a(x), dim=(0, 1)) * torch.view_as_complex(m.w)
    return m.b(torch.fft.irfft2(h, s=(4, 6), dim=(0, 1)))


def _long_filter(m: Any, x: Tensor) -> Tensor:
    h = torch.fft.rfft(m.a(x), n=12, dim=1) * torch.fft.rfft(m.w, n=12, dim=0)
    return m.b(torch.fft.irfft(h, n=12, dim=1)[:, :6])


def _complex(h: Tensor) -> Tensor:
    turned = torch.polar(h.exp(), h) * torch.complex(h, h.cos())
    pairs = torch.view_as_real(turned).sum(-1)
    return pairs + torch.view_as_complex(torch.stack([h, h.sin()], -1)).angle()


def _sorts(h: Tensor) -> Tensor:
    top = h.topk(3, dim=1)[0].sum(1, keepdim=True) + h.sort(0)[0] + h.cummax(1)[0] + h.median(1, keepdim=True)[0]
    return top * h.softmax(0) + h.cumsum(1) + h.logcumsumexp(0) + h.kthvalue(2, 1, keepdim=True)[0]


def _bags(m: Any, x: Tensor) -> Tensor:
    ids = (x[..., 0] > 0).long() + torch.arange(6)  # four bags of six
    bags = [F.embedding_bag(ids, m.w, mode=mode) for mode in ("sum", "mean", "max")]
    weighted = F.embedding_bag(ids, m.w, per_sample_weights=x[..., 1], mode="sum")
    return m.b(torch.relu(sum(bags) + weighted))


def _unpool(h: Tensor) -> Tensor:
    small, places = F.max_pool2d(h, 2, return_indices=True)
    return F.max_unpool2d(small * 2, places, 2)


def _resized(h: Tensor) -> Tensor:
    out = h
    for mode in ("bilinear", "bicubic"):
        out = out + F.interpolate(F.interpolate(h, size=5, mode=mode, antialias=True), size=8, mode=mode)
    out = out + F.interpolate(F.adaptive_avg_pool2d(h, 3), size=8, mode="nearest-exact")
    return out + F.interpolate(F.adaptive_max_pool2d(h, 2) + F.lp_pool2d(h, 2, 4), size=8, mode="nearest")


def _sampled(m: Any, x: Tensor) -> Tensor:
    grid = torch.tanh(m.g(x).permute(0, 2, 3, 1))
    return m.b(F.grid_sample(m.a(x), grid, mode="bilinear", padding_mode="reflection", align_corners=False))


def _solved(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    square = h.movedim(-1, 0).unflatten(-1, (3, 3))
    square = square @ square.mT + torch.eye(3, dtype=h.dtype)
    sides = h.movedim(-1, 0).unflatten(-1, (3, 3))
    found = torch.linalg.solve(square, sides) + torch.linalg.solve(square, sides[..., 0]).unsqueeze(-1)
    lower = torch.linalg.cholesky(square)
    found = found + torch.linalg.solve_triangular(lower, sides, upper=False) + torch.cholesky_solve(sides, lower)
    return m.b(found.flatten(2).movedim(0, -1))


def _near(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).unflatten(-1, (8, 4)).transpose(1, 2)
    return m.b((torch.cdist(h, h.sin()) + 0.1).matmul(h).transpose(1, 2).flatten(2))


def _shuffled(h: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.pixel_shuffle(h, 2), 2) + F.fold(F.unfold(h, 2, stride=2) * 2, (8, 8), 2, stride=2)


ALONG = {
    "transforms": between(_transforms),
    "filter in the frequency domain": Case(
        forward=_filtered, parts={**TWO, "w": weight(4, 4, 32, 2)}, cut=("a.weight", "b.weight", "w"), styles=PAIR
    ),
    "long filter": Case(
        forward=_long_filter, parts={**TWO, "w": weight(6, 32)}, cut=("a.weight", "b.weight", "w"), styles=PAIR
    ),
    "complex numbers": between(_complex),
    "sorting and scanning": between(_sorts),
    "gated": Case(
        forward=lambda m, x: m.b(F.glu(m.a(x))), parts={"a": linear(16, 64), "b": linear(32, 16)},
        styles={"a.weight": "packed_colwise", "b.weight": "rowwise"},
    ),
    "gated along another dim": between(lambda h: F.glu(h, 1)),
    "renorm": between(lambda h: torch.renorm(h.movedim(-1, 0), 2, 0, 0.5).movedim(0, -1)),
    "cross": between(lambda h: torch.linalg.cross(h[:, :3], h[:, 3:], dim=1)),
    "places in rows": between(lambda h: h + torch.bucketize(h.detach(), torch.tensor([-0.5, 0.0, 0.5])) * h),
    "distances per head": Case(forward=_near, parts=TWO, styles=PAIR),
    "diagonals": between(lambda h: torch.diag_embed(h.transpose(1, 2)).sum(-2).transpose(1, 2)),
    "inverse and others": matrices(lambda s: torch.linalg.inv(s) + torch.linalg.pinv(s) + torch.linalg.matrix_exp(s)),
    "decompositions": matrices(
        lambda s: torch.linalg.cholesky(s) + torch.linalg.qr(s)[1].abs()
        + torch.linalg.svdvals(s)[..., None] * torch.linalg.eigvalsh(s).unsqueeze(-2)
    ),
    "determinants": matrices(
        lambda s: s * torch.linalg.det(s)[..., None, None] + torch.linalg.slogdet(s)[1][..., None, None]
    ),
    "equations": Case(forward=_solved, parts=TWO, x=(4, 9, 16), styles=PAIR),
    "bilinear": Case(
        forward=lambda m, x: m.b(torch.relu(m.a(x, x.sin()))), styles=PAIR,
        parts={"a": lambda: nn.Bilinear(16, 16, 32), "b": linear(32, 16)},
    ),
    "bags of rows": Case(
        forward=_bags, parts={"w": weight(8, 32), "b": linear(32, 16)}, cut=("w", "b.weight"),
        styles={"w": "embedding_colwise", "b.weight": "rowwise"},
    ),
    "weight norm": Case(
        forward=lambda m, x: m.b(torch.relu(m.a(x))),
        parts={"a": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), "b": linear(32, 16)},
        cut=("a.parametrizations.weight.original0", "a.parametrizations.weight.original1", "b.weight"),
    ),
    "weight norm of a convolution": Case(
        forward=lambda m, x: m.b(torch.relu(m.a(x))), x=(2, 3, 8, 8),
        parts={"a": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 3)), "b": conv(16, 4)},
        cut=("a.parametrizations.weight.original0", "a.parametrizations.weight.original1", "b.weight"),
    ),
    "unpooling": image(_unpool),
    "resizing and pooling": image(_resized),
    "sampled by a grid": Case(
        forward=_sampled, parts={**IMAGE, "g": conv(3, 2)}, x=(2, 3, 8, 8), styles=PAIR, gathers=1
    ),
    "shuffled and unfolded": Case(
        forward=lambda m, x: m.b(_shuffled(m.a(x))), parts=IMAGE, x=(2, 3, 8, 8), styles=PAIR
    ),
    "slopes per channel": Case(
        forward=lambda m, x: m.b(m.p(m.a(x))), parts={**IMAGE, "p": noisy(lambda: nn.PReLU(16))}, x=(2, 3, 8, 8),
        cut=("a.weight", "b.weight", "p.weight"), styles=PAIR,
    ),
    "instance norm": Case(
        forward=lambda m, x: m.b(torch.relu(F.instance_norm(m.a(x), weight=m.w, bias=m.v))), x=(2, 3, 8, 8),
        styles=PAIR,
        parts={**IMAGE, "w": weight(16), "v": weight(16)}, cut=("a.weight", "b.weight", "w", "v"),
    ),
    "similar": between(lambda h: h * F.cosine_similarity(h, h.sin(), dim=1).unsqueeze(1)),
}  # fmt: skip
