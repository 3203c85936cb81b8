"""In float64 all casts to a lower type give float64, and nothing else changes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autotp.promotion import Promoted, widen_model


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.bfloat16),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.long().float(),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.zeros(3, dtype=torch.float32),
        lambda x: x.new_ones(3, dtype=torch.float32),
        lambda x: torch.full_like(x, 2.0, dtype=torch.float16),
        lambda x: torch.tensor([0.5]),
        lambda x: torch.arange(3) / 2,
        lambda x: torch.tensor(np.ones(3, dtype=np.float32)),
        lambda x: torch.view_as_real(x.to(torch.complex64)),
        lambda x: x.type_as(torch.ones(1)),
    ],
)
def test_casts_give_float64(cast: object) -> None:
    x = torch.randn(4, dtype=torch.float64)
    with Promoted():
        assert cast(x).dtype is torch.float64  # type: ignore[operator]
    assert torch.get_default_dtype() is torch.float32


def test_bits_and_integers_are_left_alone() -> None:
    x = torch.randn(4)
    with Promoted():
        assert x.view(torch.int32).view(torch.float32).dtype is torch.float32
        assert x.to(torch.int64).dtype is torch.int64
        assert torch.arange(3).dtype is torch.int64


def test_autocast_that_is_off_changes_nothing() -> None:
    with Promoted(), torch.autocast(device_type="cpu", enabled=False):
        assert F.linear(torch.ones(2, 3), torch.ones(4, 3).float()).dtype is torch.float64


def test_dropout_can_be_taken_out() -> None:
    x, attention = torch.ones(100), torch.nn.MultiheadAttention(8, 2, dropout=0.5)
    query = torch.randn(3, 1, 8)
    with Promoted(None, dropout=False):
        assert torch.equal(nn.Dropout(0.5)(x), x)
        assert torch.equal(F.dropout(x, 0.5, training=True), x)
        assert torch.equal(attention(query, query, query)[0], attention(query, query, query)[0])
        same = [F.scaled_dot_product_attention(query, query, query, None, 0.5) for _ in range(2)]
        assert torch.equal(*same)
    with Promoted(None):
        assert not torch.equal(F.dropout(x, 0.5), x)


def test_it_works_below_and_above_other_modes() -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, dtype=torch.float64)
    for first, second in ((Counting(), Promoted()), (Promoted(), Counting())):
        with first, second:
            assert x.float().dtype is torch.float64
        assert (first if isinstance(first, Counting) else second).calls  # type: ignore[union-attr]


def test_widening_keeps_what_is_shared() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))
            self.register_buffer("same", self.turns)
            self.loose = torch.ones(2)
            self.count = torch.tensor(3)

    model = Sharing()
    weight = model.a.weight
    turns = copy.deepcopy(model.turns)
    widen_model(model)
    assert model.a.weight is weight is model.b.weight
    assert weight.dtype is model.loose.dtype is torch.float64
    assert model.turns is model.same
    assert torch.equal(model.turns, turns.to(torch.complex128))
    assert model.count.dtype is torch.int64


@pytest.mark.parametrize(
    ("a", "b", "offsets"),
    [
        ((6, 8), (3, 8, 16), [2, 2, 6]),
        ((8, 16), (16, 8), [8, 16]),
        ((2, 8, 8), (8, 16), [8, 16]),
        ((2, 8, 8), (2, 8, 8), None),
    ],
)
def test_grouped_products_have_float64_too(a: tuple[int, ...], b: tuple[int, ...], offsets: list[int] | None) -> None:
    left, right = torch.randn(a), torch.randn(b)
    offs = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    if offs is None:
        expected = left @ right
    elif len(b) == 3:
        expected = torch.cat([left[0:2] @ right[0], left[2:6] @ right[2]])
    elif len(a) == 2:
        expected = torch.stack([left[:, :8] @ right[:8], left[:, 8:] @ right[8:]])
    else:
        expected = torch.cat([left[0] @ right[:, :8], left[1] @ right[:, 8:]], -1)
    with Promoted():
        found = F.grouped_mm(left.double(), right.double(), offs=offs)
        shape = F.grouped_mm(left.double().to("meta"), right.double().to("meta"), offs=offs).shape
    assert found.dtype is torch.float64
    assert shape == found.shape
    assert torch.allclose(found.float(), expected, atol=1e-5)
