"""Buffers of models on meta: equal to those of a normally built module, or refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import autotp
from autotp import construction
from autotp.construction import buffers_of, constructor_of, put_buffers, unfilled
from autotp.errors import BuildError
from autotp.planning import plan


class Rotary(nn.Module):
    """Keeps one of its arguments."""

    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)


class Keeps(nn.Module):
    """Keeps both."""

    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)
        self.positions = torch.arange(dim)  # no buffer, but a tensor all the same


class Block(nn.Module):
    """Keeps none, but its width shows."""

    def __init__(self, width=8, bias=None):
        super().__init__()
        self.rotary = Rotary(width, base=500.0)
        self.fc = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(width, width).tril() == 0)

    def forward(self, x):
        return self.fc(x) * self.rotary.inv_freq.sum()


class Bare(Block):
    """No arguments at all."""

    def __init__(self):
        super().__init__(16)


class Scaled(Keeps):
    """Keeps something else under the name of its argument."""

    def __init__(self, dim, base):
        super().__init__(dim, base)
        self.base = base * 2


class Hidden(nn.Module):
    """An argument that shows nowhere but in the values."""

    def __init__(self, width=4, base=3.0, spread=0.5):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.fc.weight.data.normal_(0, spread)
        self.register_buffer("powers", base ** torch.arange(5.0))


@dataclasses.dataclass
class Config:
    dim: int = 8
    base: float = 100.0


class WithConfig(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.dim, config.base)
        self.norm = nn.BatchNorm1d(4)


def meta(cls, *args, **kwargs):
    with torch.device("meta"):
        return cls(*args, **kwargs)


def check(made, expected):
    """All buffers and plain tensors are there and equal."""
    put_buffers(made, buffers_of(made), "cpu")
    assert not unfilled(made)
    for ours, theirs in zip(made.modules(), expected.modules(), strict=True):
        for kind in ("_buffers", "__dict__"):
            for name, value in getattr(theirs, kind).items():
                if isinstance(value, torch.Tensor):
                    got = getattr(ours, kind)[name]
                    assert got.dtype == value.dtype
                    assert torch.equal(got, value), name


BUILT = {
    "kept arguments": (Keeps, (8, 33.0)),
    "no arguments": (Bare, ()),
    "a config": (WithConfig, (Config(16, 7.0),)),
}


@pytest.mark.parametrize("name", BUILT)
def test_built_under_meta(name):
    cls, args = BUILT[name]
    check(meta(cls, *args), cls(*args))


@pytest.mark.parametrize("name", [*BUILT, "lost arguments"])
def test_built_by_on_meta(name):
    cls, args = BUILT.get(name, (Rotary, (8, 33.0)))
    made = autotp.on_meta(cls, *args)
    assert all(p.is_meta for p in made.parameters())
    check(made, cls(*args))


def test_moved_to_another_dtype_afterwards():
    check(meta(Keeps, 8, 33.0).to(torch.float64), Keeps(8, 33.0).to(torch.float64))


def test_built_with_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        made, expected = meta(WithConfig, Config()), WithConfig(Config())
    finally:
        torch.set_default_dtype(torch.float32)
    check(made, expected)


def test_a_part_that_can_be_rebuilt_in_a_whole_that_cannot():
    class Whole(nn.Module):
        def __init__(self, secret):
            super().__init__()
            self.parts = nn.Sequential(Keeps(8, secret), nn.BatchNorm2d(3))

    check(meta(Whole, 33.0), Whole(33.0))


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_an_argument_that_shows_nowhere_is_not_taken_to_be_its_default(base):
    made = meta(Rotary, 8, base)
    with pytest.raises(BuildError) as caught:
        buffers_of(made)
    for word in ("inv_freq", "Rotary", "autotp.on_meta(Rotary"):
        assert word in str(caught.value)


def test_a_width_that_was_not_kept_shows():
    class Wide(nn.Module):
        def __init__(self, width=8, hidden=16):
            super().__init__()
            self.fc = nn.Linear(width, hidden)
            self.register_buffer("mask", torch.ones(hidden).cumsum(0))

    check(meta(Wide), Wide())
    with pytest.raises(BuildError, match="mask"):
        buffers_of(meta(Wide, hidden=17))  # not what the defaults make


@pytest.mark.parametrize("made", [lambda: meta(Scaled, 8, 5.0), lambda: meta(Block, 8), lambda: meta(Hidden)])
def test_what_cannot_be_told(made):
    """Kept under another value; an argument that is no number; a number that the values alone depend on."""
    with pytest.raises(BuildError):
        buffers_of(made())


def test_a_number_that_only_starting_values_depend_on():
    class Spread(nn.Module):
        def __init__(self, spread=0.5):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4) * spread)
            self.register_buffer("ones", torch.ones(3))

    check(meta(Spread), Spread())
    assert constructor_of(meta(Spread)) is None


def test_a_constructor_is_found_for_starting_values():
    assert constructor_of(meta(Bare)) is not None
    assert constructor_of(meta(Keeps, 8, 33.0))().base == 33.0
    assert constructor_of(meta(Block, 8)) is None


def test_flags_are_not_varied():
    class Fetches(nn.Module):
        def __init__(self, pretrained=False):
            super().__init__()
            assert not pretrained
            self.register_buffer("ones", torch.ones(3))

    with pytest.raises(BuildError):
        buffers_of(meta(Fetches))


def test_on_meta_keeps_the_arguments_as_they_were():
    config = Config(8, 7.0)
    made = autotp.on_meta(WithConfig, config)
    config.base = 9.0
    again = constructor_of(made)()
    assert torch.equal(again.rotary.inv_freq, made.rotary.inv_freq)
    assert again.config.base == 7.0


def test_on_meta_refuses_what_is_no_constructor():
    with pytest.raises(BuildError, match="there already"):
        autotp.on_meta(nn.Sequential, nn.Linear(2, 2))
    with pytest.raises(BuildError, match="int"):
        autotp.on_meta(lambda: 3)


def test_with_buffers_leaves_the_model_as_it_was():
    made = meta(Bare)
    before = dict(made.named_buffers())
    with construction.with_buffers(made) as unknown:
        assert unknown == []
        assert not any(b.is_meta for b in made.buffers())
    assert all(made.get_buffer(name) is b for name, b in before.items())


class Permuted(nn.Module):
    """Which features meet is in an integer buffer."""

    def __init__(self, order=None):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("order", torch.arange(8).flip(0) if order is None else order)

    def forward(self, x):
        h = self.up(x)
        return self.down(torch.relu(h + h[..., self.order]))


def test_the_content_of_buffers_on_meta_is_planned_with():
    class Flipped(Permuted):
        def __init__(self):
            super().__init__()

    x = torch.zeros(2, 4)
    expected = plan(Flipped(), tp=2, sample=x)
    made = plan(meta(Flipped), tp=2, sample=x)
    assert made == expected
    assert not [f for f in made.findings if f.code == "TP-BUFFER"]
    (found,) = [f for f in plan(meta(Permuted), tp=2, sample=x).findings if f.code == "TP-BUFFER"]
    assert found.where == "order"
