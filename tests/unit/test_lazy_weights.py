"""Slices of tensors that are made from stored tensors: equal to slices of the real thing, and no more is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.lazy_weights import Lazy, groups
from autotp.parts import pieces


class Source:
    """A stored tensor that counts what is read of it."""

    def __init__(self, tensor):
        self.tensor, self.key, self.file = tensor, "t", Path("f")
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.elements = 0

    def read(self, want):
        out = pieces(self.tensor, want)
        self.elements += out.numel()
        return out


def sources(*shapes):
    start = 0
    made = []
    for shape in shapes:
        n = torch.Size(shape).numel()
        made.append(Source(torch.arange(start, start + n, dtype=torch.float64).view(shape)))
        start += n
    return made


def experts(*tensors):
    """Each expert's gate and up, stacked and joined."""
    half = len(tensors) // 2
    return torch.cat([torch.stack(tensors[:half], 0), torch.stack(tensors[half:], 0)], dim=1)


def permuted(t):
    return t.view(4, 3, 2, 5).transpose(1, 2).reshape(24, 5)


def interleaved(t):
    return t.reshape(12, 2, 5).transpose(0, 1).reshape(24, 5).contiguous()


def chunked(t):
    return torch.chunk(t, 3, dim=0)[1].contiguous()


MADE = {
    "experts": (experts, [(3, 4)] * 4, (2, 6, 4)),
    "permuted for rope": (permuted, [(24, 5)], (24, 5)),
    "interleaved": (interleaved, [(24, 5)], (24, 5)),
    "chunk": (chunked, [(24, 5)], (8, 5)),
    "split": (lambda t: torch.split(t, [5, 19], dim=0)[1], [(24, 5)], (19, 5)),
    "negative dims": (lambda t: torch.split(t, 2, dim=-1)[1].transpose(-1, -2), [(3, 4)], (2, 3)),
    "squeezed": (lambda t: torch.chunk(t, 4, dim=0)[2].squeeze(0), [(4, 3, 5)], (3, 5)),
    "select": (lambda t: t[2].t(), [(4, 3, 5)], (5, 3)),
    "every second": (lambda t: t[1::2, :3], [(9, 5)], (4, 3)),
    "flattened": (lambda t: t.reshape(4, -1), [(4, 2, 3, 2)], (4, 12)),
    "unsqueezed": (lambda t: t.unsqueeze(1).permute(2, 0, 1), [(4, 6)], (6, 4, 1)),
    "computed": (lambda t: (t * 2).roll(1, 0), [(6, 4)], (6, 4)),
    "diagonal": (lambda t: t.diagonal(), [(5, 5)], (5,)),
    "expanded": (lambda t: t.expand(3, 5), [(1, 5)], (3, 5)),
    "cast": (lambda t: t.to(torch.float32).clone(), [(6, 4)], (6, 4)),
    "of one row": (lambda t: torch.chunk(t, 1, dim=0)[0].view(1, 2, 2).transpose(1, 2), [(1, 4)], (1, 2, 2)),
}


@st.composite
def wanted(draw, shape):
    want = []
    for size in shape:
        if draw(st.booleans()):
            want.append(None)
            continue
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=4)))
        ranges = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b > a]
        want.append(tuple(draw(st.permutations(ranges))))
    return tuple(want)


@pytest.mark.parametrize("name", MADE)
@given(data=st.data())
@settings(max_examples=40)
def test_a_slice_is_the_slice_of_the_whole(name, data):
    function, shapes, shape = MADE[name]
    stored = sources(*shapes)
    made = function(*map(Lazy, stored))
    assert tuple(made.shape) == shape
    want = data.draw(wanted(shape))
    got = made.source.read(want)
    expected = pieces(function(*(s.tensor for s in stored)), want)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert got.is_contiguous()


@pytest.mark.parametrize(
    ("name", "want", "elements"),
    [
        ("experts", (None, ((0, 2), (3, 5)), None), 32),
        ("experts", (((1, 2),), None, None), 24),
        ("permuted for rope", (((6, 12),), None), 30),
        ("chunk", (None, ((1, 2),)), 8),
        ("select", (((0, 2),), None), 6),
        ("flattened", (((1, 3),), None), 24),
    ],
)
def test_only_what_is_needed_is_read(name, want, elements):
    function, shapes, _ = MADE[name]
    stored = sources(*shapes)
    function(*map(Lazy, stored)).source.read(want)
    assert sum(s.elements for s in stored) == elements


def test_writing_is_refused():
    with pytest.raises(NotImplementedError):
        Lazy(sources((2, 2))[0]).zero_()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (2, 2, 6), [([0], [0, 1]), ([1], [2])]),
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (4, 6), [([0, 1], [0, 1])]),
        ((4, 1), (4,), [([0], [0]), ([1], [])]),
        ((4,), (4, 1), [([0], [0]), ([], [1])]),
        ((), (1,), [([], [0])]),
    ],
)
def test_groups_of_dims(before, after, expected):
    assert groups(before, after) == expected
