"""What a module's code branches on, as its bytecode tells."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.branches import branches_of

LIMIT = 3


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.scale, self.config = 2, None, SimpleNamespace(depth=1)
        self.act, self.layers, self.sizes = torch.relu, nn.ModuleList([nn.Linear(2, 2)]), [1, 2]


def _facts(*names: str) -> set[tuple[str, ...]]:
    return {tuple(name.split(".")) for name in names}


class _Straight(_Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, _ = x.shape
        if x.dim() != 2:
            raise ValueError("only matrices")
        with torch.no_grad():
            x = x + math.pi
        return x.view(batch, -1)


class _Given(_Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x + mask


class _Own(_Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.n > 1:
            x = x * 2
        if self.scale is not None:
            x = x * self.scale
        if self.config.depth == 1 or not self.n:
            x = x + 1
        return x


class _Turns(_Base):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.n):
            x = x * i
        for layer in self.layers:
            x = layer(x)
        for size in self.sizes:
            x = x / size
        return sum([x for _ in (1, 2)])  # type: ignore[return-value]


class _Global(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if LIMIT > 2 else x + 1


class _Act(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class _Asked(_Base):
    def forward(self, x: Any) -> Tensor:
        return x[0] if isinstance(x, tuple) else x  # type: ignore[no-any-return]


def names(module: nn.Module) -> set[tuple[str, ...]] | None:
    """The chains of names that its path depends on; None if on more."""
    found = branches_of(module)
    return None if found.open else {source.names for source in found.sources}


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (_Straight, _facts()),
        (_Given, _facts()),
        (_Own, _facts("training", "n", "scale", "config.depth")),
        (_Turns, _facts("n", "layers", "sizes")),
        (_Global, _facts("LIMIT")),
        (_Act, _facts("act")),
        (_Asked, _facts("tuple")),
    ],
)
def test_known(cls: type[_Base], expected: set[tuple[str, ...]]) -> None:
    assert names(cls()) == expected


class _Value(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x + 1


class _Reassigned(_Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.act(x) if self.n else None
        return x if mask is None else x + mask


class _Size(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 4 else x + 1


class _Flag(_Base):
    def forward(self, x: Tensor, flag: Any = False) -> Tensor:
        return x if flag else x + 1  # it may be a tensor


class _Maximum(_Base):
    def forward(self, x: Tensor, n: int = 1) -> Tensor:
        return x if max(2, n) > 2 else x + 1


class _While(_Base):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x


class _Caught(_Base):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.act(x)
        except RuntimeError:
            return x


class _Comprehension(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return sum(y for y in x if y.sum() > 0)  # type: ignore[return-value]


def _helper(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


class _Helped(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return _helper(x)


class _Method(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return _helper(x)


class _Inherited(_Method):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    "cls",
    [
        _Value, _Reassigned, _Size, _Flag, _Maximum, _While, _Caught, _Comprehension, _Helped, _Method, _Inherited,
    ],
)  # fmt: skip
def test_open(cls: type[_Base]) -> None:
    assert names(cls()) is None


def test_a_function_made_elsewhere_is_open() -> None:
    module = _Straight()
    module.forward = SimpleNamespace()  # type: ignore[assignment, method-assign]
    assert names(module) is None


def test_facts_follow_the_module() -> None:
    module = _Own()
    found = branches_of(module)
    before = found.facts(module)
    assert found.facts(module) == before
    for name, value in {"n": 3, "scale": torch.ones(1), "training": False}.items():
        kept = getattr(module, name)
        setattr(module, name, value)
        assert found.facts(module) != before
        setattr(module, name, kept)
    module.config = SimpleNamespace(depth=object())  # nothing that could be compared
    assert found.facts(module) != before
