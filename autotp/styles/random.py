"""Random numbers: the same on all ranks for whole tensors, a rank's own inside cut regions.

Before a forward that draws, the ranks take over the state of the first rank's generators: whole tensors are drawn as
the unsharded model draws them. Groups beside other ones (data-parallel axes) must draw apart: each takes a seed drawn
from its first rank's generator and that rank's number, and goes on afterwards as if one number had been drawn.
Everything then follows from the state of the default generator, so activation checkpointing, which saves and restores
that state, recomputes the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotp import torch_dynamo, torch_hooks
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


@dataclass(frozen=True)
class Draws:
    """States of the generators, one per device: before, where all ranks begin, and where this one goes on."""

    untouched: list[Any]
    start: list[Any]
    after: list[Any] | None  # None: where the draws ended

    def begin(self) -> None:
        """Draw as all ranks of the group do, from the start."""
        _restore(self.start)

    def end(self) -> None:
        """Let the user's generators go on; as they were if nothing was drawn."""
        drawn = any(not torch.equal(a, b) for a, b in zip(self.start, _states(), strict=False))
        if not drawn or self.after is not None:
            _restore(self.after if drawn and self.after is not None else self.untouched)


def agreed(ranks: Ranks) -> Draws:
    """What the group draws, by its first rank's generators; a collective."""
    own = _states()
    theirs = _first_ranks(own, ranks)
    if ranks.alone and all(map(torch.equal, own, theirs)):
        return Draws(own, own, None)
    _draw_seed()
    after = _states()
    if not ranks.alone:
        _restore(theirs)
        _seed(_mixed(_draw_seed(), ranks.first))
        theirs = _states()
    return Draws(own, theirs, after)


def _first_ranks(states: list[Any], ranks: Ranks) -> list[Any]:
    """The first rank's states."""
    flat = torch.cat(states)
    flat = flat.cuda() if dist.get_backend(ranks.group) == "nccl" else flat
    return list(ranks.broadcast_(flat).cpu().split([len(s) for s in states]))


@contextmanager
def drawing_alike(ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Inside, all ranks of the group draw the same numbers; calling what it gives begins them again."""
    draws = agreed(ranks)
    draws.begin()
    try:
        yield draws.begin
    finally:
        draws.end()


@torch_dynamo.at_trace
def _not_traced() -> None:
    raise torch_dynamo.refused(
        "the model draws random numbers (dropout), and all ranks must draw alike, which is arranged before its "
        "forward: compile the model, or its blocks, instead of a function that calls it"
    )


class SharedDraws(torch_hooks.Hook):
    """Hooks around the whole model's forward that make the group draw alike."""

    def __init__(self, ranks: Ranks, always: bool) -> None:
        self.ranks, self.always = ranks, always
        self.kept: list[Draws | None] = []

    @torch_dynamo.uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        draws = None
        if self.always or module.training:
            if torch.compiler.is_compiling():
                _not_traced()
            draws = agreed(self.ranks)
        self.kept.append(draws)
        if draws is not None:
            draws.begin()

    @torch_dynamo.uncompiled
    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        draws = self.kept.pop()
        if draws is not None:
            draws.end()
