"""What all builders share: seeded inputs, noise on constant weights, and the record of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
LANGUAGE, OTHER = 0.95, 0.90  # share of the bytes of weight matrices that must be cut


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A builder, the share that must be cut, whether it takes long, and the mode it runs in."""

    build: Callable[[], Built]
    share: float = OTHER
    long: bool = False
    train: bool = False


def tokens(vocabulary: int = 128, batch: int = 2, length: int = 12, seed: int = 7) -> Tensor:
    """Token ids; 0 and 1 are left out, because models give them a meaning."""
    return torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 7) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def finish(entry: Entry, seed: int = 0) -> Built:
    """Build with fixed weights; what is constant gets noise, so that a bias added twice or a lost norm shows."""
    torch.manual_seed(seed)
    model, args, kwargs = entry.build()
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05)
    _calibrate(model, args)
    return model.train(entry.train), args, kwargs


@torch.no_grad()
def _calibrate(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Give batch norms the statistics of normal images; else deep layers get no signal, and no error in them shows."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None
        model.train()(floats(16, *args[0].shape[1:], seed=9))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
