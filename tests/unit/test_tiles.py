"""Tensors that ranks hold tiles of, cut along two dims at once: all of their dims are joined, or none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autotp.analysis import analyse
from autotp.call_edits import CallEdit, CannotEdit
from autotp.ownership.state import Want
from autotp.program import Lowering
from autotp.search import Analysis


class Tiled(nn.Module):
    """Two heads of four features on four ranks: each has half a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).unflatten(-1, (2, 4)).tanh().flatten(-2))


@pytest.fixture(name="found")
def _found() -> Analysis:
    return analyse(Tiled(), (torch.zeros(3, 16),), {}, tp=4)


def _edit(found: Analysis, dims: tuple[int, ...]) -> CallEdit:
    """That of tanh, should it want only these dims of the tile to be cut as its result is."""
    at, op = next((i, op) for i, op in enumerate(found.trace.ops) if op.func is torch.ops.aten.tanh.default)
    tile = op.ins[0]
    assert list(found.dealing.sets(tile)) == [1, 2]
    found.own.wants[at] = [Want(tile, "as", tuple((d, (op.outs[0], d)) for d in dims))]
    return Lowering(found.own, found.dealing).edits()[op.call]


def test_a_tile_is_kept_or_joined_as_a_whole(found: Analysis) -> None:
    assert not _edit(found, (1, 2)).operands
    (edit,) = _edit(found, ()).operands.values()
    assert [d for d, _ in edit.gather] == [1, 2]


@pytest.mark.parametrize("kept", [1, 2])
def test_of_a_tile_one_dim_is_not_joined_and_another_kept(found: Analysis, kept: int) -> None:
    """No rule is known that asks for this; one that did would get wrong numbers."""
    with pytest.raises(CannotEdit, match="needs an operand cut in another way"):
        _edit(found, (kept,))
