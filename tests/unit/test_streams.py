"""Token positions as nodes: what may merge, and what is still one piece of code at every length."""

import numpy as np
import pytest
import torch

from autotp.ownership.dealing import Tokens, shares
from autotp.ownership.nodes import Nodes, compress
from autotp.ownership.streams import Streams


@pytest.fixture
def streams():
    nodes = Nodes()
    nodes.allocate(8)  # of parameters
    return Streams(nodes)


def spread(nodes, batch=2, width=3):
    return nodes.view(1, -1, 1).expand(batch, len(nodes), width)


def test_positions_merge_with_their_like_only(streams):
    a, b, c = (streams.open(n).numpy() for n in (4, 4, 5))
    assert streams.may_merge(a, b, at=0)
    assert not streams.may_merge(a[:3], b[:3], at=1), "not all of them"
    assert not streams.may_merge(a, b[::-1].copy(), at=2), "other positions"
    assert not streams.may_merge(a, c[:4], at=3), "another length"
    assert not streams.may_merge(a, np.array([1, 2, 3, 4]), at=4), "nodes of parameters"
    assert streams.may_merge(np.array([1, 2]), np.array([3, 4]), at=5)


def test_what_mixes_a_stream_is_remembered_but_not_that_two_met(streams):
    a, b = (streams.open(n).numpy() for n in (4, 5))
    streams.may_merge(a, a[::-1].copy(), at=7)
    streams.may_merge(a, b[:4], at=8)
    assert streams.refused == [(int(a[0]), 7)]


def test_streams_that_merged_are_one(streams):
    a, b = streams.open(4), streams.open(4)
    assert streams.of(spread(a)) != streams.of(spread(b))
    streams.nodes.union(a.numpy(), b.numpy())
    assert streams.of(spread(a)) == streams.of(spread(b)) == int(a[0])
    assert streams.of(torch.tensor([1, 2])) is None
    assert streams.of(torch.empty(0)) is None


@pytest.mark.parametrize(
    ("change", "sound", "dim"),
    [
        (lambda o: o, True, 1),
        (lambda o: o.transpose(0, 1), True, 0),
        (lambda o: o.reshape(-1, 3), True, None),  # batch and tokens
        (lambda o: o.transpose(0, 1).reshape(-1, 3), True, None),  # tokens and batch
        (lambda o: o[:, ::2], False, None),
        (lambda o: o[:, 1:], False, None),
        (lambda o: o.flip(1), False, None),
        (lambda o: o.roll(1, 1), False, None),
        (lambda o: o.view(2, 2, 2, 3), False, None),  # windows
        (lambda o: o[:, :1], False, None),
    ],
)
def test_tokens_must_stay_together_and_in_order(streams, change, sound, dim):
    o = compress(change(spread(streams.open(4))).clone())
    assert streams.sound(o) is sound
    assert streams.dim(o) == dim


def test_shares_are_even_and_none_is_empty():
    assert shares(8, 4) == ((0, 2), (2, 2), (4, 2), (6, 2))
    for n in range(4, 30):
        parts = shares(n, 4)
        most = parts[-1][1]
        assert [i for first, size in parts for i in range(first, first + size)] == list(range(n))
        assert {size for _, size in parts} == {n // 4, most}
        assert most - n // 4 == bool(n % 4)
        assert all(first + most <= n for first, _ in parts), "a rank has no window of the largest size"


def test_tokens_of_two_streams_differ():
    halves = (range(2), range(2, 4))
    assert Tokens(halves, 1) == Tokens(halves, 1)
    assert Tokens(halves, 1) != Tokens(halves, 2)
    assert Tokens(halves, 1) != halves
