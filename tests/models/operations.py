"""One operation at a time between two layers: sharded it is exact, and both layers are really cut around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Parts = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module made of parts and what it does with them.

    ``cut``: its parameters that must be cut; ``gathers``: how often a cut tensor may be put together in the forward;
    ``styles``: styles that the plan must give. ``rules``: what is asked for. ``sums``: how many sums the forward makes.
    """

    forward: Callable[[Any, Tensor], Any]
    parts: Parts
    x: tuple[int, ...] = (4, 6, 16)
    cut: tuple[str, ...] = ("a.weight", "b.weight")
    gathers: int = 0
    styles: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] | None = None
    sums: int | None = None
    train: bool = True
    tp: tuple[int, ...] = (2,)
    long: bool = False


class Parted(nn.Module):
    """The module of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        for name, make in case.parts.items():
            part = make()
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.how = case.forward

    def forward(self, x: Tensor) -> Any:
        """What the case is about."""
        return self.how(self, x)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter of normal numbers."""
    return lambda: nn.Parameter(torch.randn(shape) * 0.3)


def linear(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    """A linear layer."""
    return lambda: nn.Linear(inputs, outputs)


def conv(inputs: int, outputs: int, kernel: int = 1) -> Callable[[], nn.Module]:
    """A two-dimensional convolution that keeps the size of the image."""
    return lambda: nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def noisy(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A module whose parameters are not all ones or zeros, so that a factor or summand too many shows."""

    def build() -> nn.Module:
        module = make()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p) * 0.3)
        return module

    return build


def measured(case: Case, tp: int) -> dict[str, Any]:
    """Figures of a case on this rank's side of ``tp`` ranks, and what the plan says."""
    from autotp.measuring import Settings, measure
    from tests.harness.planned import planned_once
    from tests.harness.tasks import autotp_shard, mesh_of, summary

    mesh = mesh_of(tp)
    if dist.get_rank() >= tp:
        return {}
    torch.manual_seed(0)
    model = Parted(case).train(case.train)
    inputs = ((torch.randn(case.x),), {})
    with planned_once(mesh) as found:
        shard = functools.partial(autotp_shard, rules=case.rules)
        figures = summary(measure(model, inputs, mesh, shard, Settings()))
    made = found[0].plan
    rows = {r.name: (r.style, r.is_cut, r.reason) for r in made.parameters}
    gathers = sum(c.kind == "all_gather" and c.when == "forward" for c in made.collectives)
    return {**figures, "rows": rows, "gathers": gathers, "collectives": [(c.kind, c.when) for c in made.collectives]}


def check(found: dict[str, Any], case: Case) -> None:
    """Exact, and cut as the case says."""
    rows = found["rows"]
    shown = "\n".join(f"{n}: {r[0]}: {r[2]}" for n, r in rows.items())
    assert found["ok"] and found["promoted"], (found, shown)
    whole = [n for n in case.cut if not rows[n][1]]
    assert not whole, f"left whole: {whole}\n{shown}"
    assert found["gathers"] <= case.gathers, f"{found['gathers']} gathers\n{shown}"
    sums = found["collectives"].count(("all_reduce", "forward"))
    assert case.sums in (None, sums), f"{sums} sums forward, expected {case.sums}\n{shown}"
    other = {n: rows[n][0] for n, s in case.styles.items() if rows[n][0] != s}
    assert not other, f"other styles than expected: {other}\n{shown}"
