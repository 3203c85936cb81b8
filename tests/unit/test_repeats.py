"""Repeated blocks are recorded once, in stacks of several kinds too, and nothing of the plan depends on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.ownership.nodes import Nodes, compress
from autotp.plans_io import dumps, loads
from autotp.trace import trace

X = torch.ones(2, 3, 8)


class Block(nn.Module):
    """Residual; `heads` is a number that matters, `index` one that is the block's position."""

    def __init__(self, index: int, heads: int = 4, act: Any = torch.relu) -> None:
        super().__init__()
        self.index, self.heads, self.act = index, heads, act
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x)).view(2, 3, self.heads, -1)
        return x + self.down(h.flatten(2))


class Gated(Block):
    """A second kind, with a part more."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.gate = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class Told(Block):
    """Also returns what is cut inside; the stack leaves it."""

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.up(x))
        return x + self.down(h), h


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = out[0] if isinstance(out, tuple) else out
        return x


def power(x: Tensor, exponent: int) -> Tensor:
    return torch.relu(x) ** exponent


def skipped(blocks: list[nn.Module]) -> set[int]:
    """Positions of the blocks that were not recorded."""
    record = trace(Stack(blocks), (X,), {})
    return {int(path.split(".")[1]) for path, _ in record.skipped}


def in_turn(depth: int = 10) -> list[nn.Module]:
    return [Gated(i) if i % 2 else Block(i) for i in range(depth)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([Block(i) for i in range(6)], {2, 3, 4}),
        (in_turn(), {4, 5, 6, 7}),
        ([Block(0) for _ in range(6)], {2, 3, 4}),
        ([Block(7 - i) for i in range(6)], set()),  # a number that is no position tells them apart
        ([Block(i, heads=2 if i == 3 else 4) for i in range(6)], {2, 4}),
        ([Block(i, act=partial(power, exponent=2)) for i in range(6)], {2, 3, 4}),
        ([Block(i, act=partial(power, exponent=2 + (i == 3))) for i in range(6)], {2, 4}),
        ([Block(i, heads=True if i == 3 else 1) for i in range(6)], {2, 4}),
    ],
)
def test_which_blocks_are_alike(blocks: list[nn.Module], expected: set[int]) -> None:
    assert skipped(blocks) == expected


@pytest.mark.parametrize("blocks", [in_turn(), [Told(i) for i in range(8)]], ids=["in turn", "told"])
def test_the_plan_is_that_of_all_blocks_recorded(blocks: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(blocks)
    assert trace(model, (X,), {}).skipped
    folded = autotp.plan(model, tp=2, sample=X)
    monkeypatch.setattr("autotp.repeats.Repeats.watch", lambda *_: None)
    assert not trace(model, (X,), {}).skipped
    full = autotp.plan(model, tp=2, sample=X)
    assert folded == full, full.diff(folded)
    assert full.cut_share == 1.0
    places = [c.module for c in full.collectives if c.when == "forward"]
    assert places == [f"layers.{i}.down" for i in range(len(blocks))]


def test_stacks_of_two_kinds_are_short_in_a_file() -> None:
    plan = autotp.plan(Stack(in_turn()), tp=2, sample=X)
    text = dumps(plan)
    assert loads(text) == plan
    assert text.count("up.weight") == text.count("gate.weight") == 1, text


def test_few_owners_do_not_hold_the_memory_they_were_found_in() -> None:
    owners = compress(torch.arange(4).expand(1000, 1000, 4).contiguous())
    assert owners.shape == (1000, 1000, 4) and owners.untyped_storage().nbytes() == 4 * owners.itemsize


def test_nodes_are_handed_out_once() -> None:
    nodes = Nodes()
    firsts = [nodes.allocate(n) for n in (3, 1, 1000, 2)]
    assert firsts == [1, 4, 5, 1005]
