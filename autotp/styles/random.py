"""Random numbers: the same on all ranks for whole tensors, a rank's own inside cut regions.

Before a forward that draws, the group agrees on a seed drawn from the first rank's generator; the user's generator goes
on after it as if one number had been drawn. Everything then follows from the state of the default generator, so
activation checkpointing, which saves and restores that state, recomputes the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotp import torch_hooks
from autotp.styles.comm import Ranks

_MIX = 0x9E3779B97F4A7C15


def _mixed(seed: int, salt: int) -> int:
    return (seed ^ (salt * _MIX)) & 0x7FFFFFFFFFFFFFFF


def _states() -> list[Any]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])


def _restore(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _draw_seed() -> int:
    return int(torch.randint(0, 2**62, ()).item())


def _seed(number: int) -> None:
    """As torch.manual_seed, without preparing to seed devices that are not in use."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


@contextmanager
def own_draws(ranks: Ranks) -> Iterator[None]:
    """Inside, this rank draws its own numbers, which follow from the shared generator's state and its rank."""
    seed = _draw_seed()
    states = _states()
    _seed(_mixed(seed, ranks.rank + 1))
    try:
        yield
    finally:
        _restore(states)


def agreed_seed(ranks: Ranks) -> int:
    """A seed drawn from the first rank's generator; every rank's generator goes on by one number."""
    device = "cuda" if dist.get_backend(ranks.group) == "nccl" else "cpu"
    seed = torch.tensor(_draw_seed(), device=device)
    dist.broadcast(seed, ranks.first, group=ranks.group)
    return _mixed(int(seed), ranks.first)


@contextmanager
def drawing_alike(ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Inside, all ranks of the group draw the same numbers; calling what it gives begins them again.

    The user's generators go on afterwards as if one number had been drawn, or as they were if none was drawn inside.
    """
    untouched = _states()
    number = agreed_seed(ranks)
    after = _states()
    _seed(number)
    start = _states()
    try:
        yield lambda: _seed(number)
    finally:
        drawn = any(not torch.equal(a, b) for a, b in zip(start, _states(), strict=False))
        _restore(after if drawn else untouched)


class SharedDraws(torch_hooks.Hook):
    """Hooks around the whole model's forward that make the group draw alike (data-parallel groups draw apart)."""

    def __init__(self, ranks: Ranks, always: bool) -> None:
        self.ranks, self.always = ranks, always
        self.kept: list[Any] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (self.always or module.training):
            self.kept.append(None)
            return
        seed = agreed_seed(self.ranks)
        self.kept.append(_states())
        _seed(seed)

    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        states = self.kept.pop()
        if states is not None:
            _restore(states)
