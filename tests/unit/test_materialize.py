"""Values drawn for a model on meta: bit for bit those of an ordinary construction with the same seed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import autotp
from autotp import playback
from autotp.errors import BuildError
from autotp.tape import recorded


class Custom(nn.Module):
    """One parameter, filled by what a test wants."""

    def __init__(self, fill, *shape):
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.weight = fill(*(shape or (12, 8)))
        self.last = nn.Linear(5, 3)


def parameter(change):
    def fill(*shape):
        weight = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            change(weight)
        return weight

    return fill


def data(weight):
    weight.data.normal_(0.0, 2.0)
    weight.data = weight.data * 3 + torch.rand(8)


def replaced(weight):
    weight.data = torch.randn(12, 8)


def from_numpy(weight):
    weight.copy_(torch.from_numpy(np.linspace(0, 1, 96, dtype=np.float32).reshape(12, 8)))


def rows(weight):
    weight.normal_()
    weight[3].fill_(0.0)
    weight[torch.randperm(12)[:2], 1] = 7.0
    weight[weight > 1.5] = 1.5


def masked(weight):
    weight.uniform_(-1, 1)
    weight.masked_fill_(torch.rand(12, 8) < 0.3, 0.0)


def read_back(weight):
    weight.normal_()
    weight.div_(weight.norm().item())
    if weight.sum() > 0:
        weight.neg_()
    weight[0, 0] = weight.tolist()[1][1] + float(weight.numpy()[2, 2])
    weight.mul_(len(weight[weight > 0]))


def drawn_into_real(weight):
    small = torch.zeros(4)
    small.uniform_()
    weight.copy_(torch.cat([small, torch.rand(4)]).expand(12, 8))


def written_into_real(weight):
    weight.normal_()
    table = torch.zeros(12, 8)
    table[2:5] = weight[2:5]
    weight.copy_(table + torch.rand(12, 8))


def seeded(weight):
    weight.normal_()
    state = torch.get_rng_state()
    torch.manual_seed(99)
    weight.add_(torch.rand(12, 8))
    torch.set_rng_state(state)


def forked(weight):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        weight.normal_()
    weight.add_(torch.rand(12, 8))
    torch.manual_seed(6)
    weight.add_(torch.rand(12, 8))


def own_generator(weight):
    generator = torch.Generator().manual_seed(3)
    weight.normal_(generator=generator)
    weight.add_(torch.rand(12, 8, generator=generator))
    weight.add_(torch.rand(12, 8))


def overwritten(weight):
    weight.normal_()
    kept = weight.clone()
    weight.uniform_()
    weight[:2] = kept[:2]


def viewed(weight):
    flat = weight.view(-1)
    flat.normal_()
    flat[::2].mul_(torch.bernoulli(torch.full((48,), 0.5)))
    weight.t()[0].zero_()


INITS = {
    "default": nn.init.kaiming_uniform_,
    "normal": nn.init.normal_,
    "truncated": nn.init.trunc_normal_,
    "xavier": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "eye": nn.init.eye_,
    "data": data,
    "replaced": replaced,
    "numpy": from_numpy,
    "rows": rows,
    "masked": masked,
    "read back": read_back,
    "drawn into a real tensor": drawn_into_real,
    "written into a real tensor": written_into_real,
    "seeded": seeded,
    "forked": forked,
    "own generator": own_generator,
    "overwritten": overwritten,
    "viewed": viewed,
}
FILLS = {
    **{name: parameter(change) for name, change in INITS.items()},
    "from random numbers": lambda *shape: nn.Parameter(torch.randn(shape) * 0.02),
    "from zeros": lambda *shape: nn.Parameter(torch.zeros(shape)),
    "from zeros, later": lambda *shape: nn.init.normal_(nn.Parameter(torch.zeros(shape))),
    "from a list": lambda *shape: nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
    "a part of a larger one": lambda *shape: nn.Parameter(torch.randn(30, 30)[:12, :8]),
    "transposed": lambda *shape: nn.Parameter(torch.randn(8, 12).t()),
    "frozen": lambda *shape: nn.Parameter(torch.rand(shape), requires_grad=False),
    "large": lambda *shape: nn.Parameter(torch.ones(300, 300) + torch.arange(300)),
}


def same(build, seed=3):
    torch.manual_seed(seed)
    expected = build()
    before = torch.get_rng_state()
    made = autotp.materialize(autotp.on_meta(build), seed)
    assert torch.equal(torch.get_rng_state(), before), "the generator was touched"
    state = expected.state_dict()
    assert list(made.state_dict()) == list(state)
    for name, value in made.state_dict().items():
        assert value.dtype == state[name].dtype
        if name != "weight" or state[name].untyped_storage().nbytes() == state[name].nbytes:
            assert value.stride() == state[name].stride()
        assert torch.equal(value, state[name]), name
    for ours, theirs in zip(made.parameters(), expected.parameters(), strict=True):
        assert type(ours) is nn.Parameter
        assert ours.requires_grad == theirs.requires_grad
        assert ours.is_leaf
    return made


@pytest.mark.parametrize("name", FILLS)
def test_a_parameter(name):
    same(lambda: Custom(FILLS[name]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if "embed" in name:
                nn.init.normal_(parameter, std=0.5)

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


def test_tied_parameters_stay_tied():
    made = same(Tied)
    assert made.head.weight is made.embed.weight


class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4, 2)
        self.attention = nn.MultiheadAttention(4, 2)


def test_copies_parametrisations_and_torchs_own_layers():
    same(Copies)


def test_a_model_made_double_while_it_is_built():
    same(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double())


def test_moved_to_another_dtype_afterwards():
    torch.manual_seed(0)
    expected = Tied().bfloat16()
    made = autotp.materialize(autotp.on_meta(Tied).bfloat16())
    assert torch.equal(made.head.weight, expected.head.weight)


def test_another_seed_gives_other_values():
    a, b = (autotp.materialize(autotp.on_meta(nn.Linear, 4, 4), seed).weight for seed in (0, 1))
    assert not torch.equal(a, b)


def test_attributes_and_objects_stay():
    made = autotp.on_meta(nn.Linear, 4, 4)
    weight = made.weight
    weight.mark = "mine"
    seen = []
    weight.register_hook(lambda grad: seen.append(grad))
    autotp.materialize(made)
    assert made.weight is weight
    assert weight.mark == "mine"
    made(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1


def test_shapes_changed_in_place_are_refused():
    def build():
        made = nn.Linear(3, 4)
        made.weight.data.t_()
        return made

    with pytest.raises(BuildError, match="in place"):
        autotp.materialize(autotp.on_meta(build))


def test_what_has_values_keeps_them():
    made = autotp.on_meta(Tied)
    made.embed.weight = made.head.weight = nn.Parameter(torch.ones(9, 4))
    autotp.materialize(made)
    assert torch.equal(made.head.weight, torch.ones(9, 4))


def test_built_under_meta():
    with torch.device("meta"):
        made = Tied()
    torch.manual_seed(4)
    assert torch.equal(autotp.materialize(made, 4).head.weight, Tied().head.weight)


def test_a_constructor_that_is_not_known():
    class Secret(nn.Module):
        def __init__(self, spread):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            nn.init.normal_(self.fc.weight, std=spread)

    with torch.device("meta"):
        made = Secret(0.3)
    with pytest.raises(BuildError) as caught:
        autotp.materialize(made)
    for word in ("fc.weight", "Secret", "autotp.on_meta(Secret"):
        assert word in str(caught.value)


def test_a_constructor_that_builds_something_else_each_time():
    widths = iter(range(2, 9))
    made = autotp.on_meta(lambda: nn.Linear(2, next(widths)))
    with pytest.raises(BuildError, match="weight has shape"):
        autotp.materialize(made)
    made.extra = nn.Linear(3, 3, device="meta")
    with pytest.raises(BuildError):
        autotp.materialize(made)


class Stack(nn.Module):
    """Initialised twice, as many are."""

    def __init__(self, again=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16))
        if again:
            for layer in self.layers:
                nn.init.normal_(layer.weight)


def bytes_alive(monkeypatch):
    """After each step, the bytes that playing back holds."""
    alive = []
    original = playback._Player._make

    def watched(self, step):
        original(self, step)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.real.values()}
        alive.append(sum(held.values()))

    monkeypatch.setattr(playback._Player, "_make", watched)
    return alive


@pytest.mark.parametrize("again", [False, True])
def test_one_tensor_in_memory_at_a_time(monkeypatch, again):
    with recorded(0) as reel:
        made = Stack(again)
    taken = []
    alive = bytes_alive(monkeypatch)
    reel.play({layer.weight.slot: lambda value: taken.append(value.sum().item()) for layer in made.layers})
    assert len(taken) == 16
    assert max(alive) == 64 * 64 * 4


def test_the_memory_check_can_fail(monkeypatch):
    """A constructor that needs two at once."""
    with recorded(0) as reel:
        made = Stack()
        with torch.no_grad():
            made.layers[0].weight.add_(made.layers[15].weight)
    alive = bytes_alive(monkeypatch)
    reel.play({layer.weight.slot: lambda value: None for layer in made.layers})
    assert max(alive) == 2 * 64 * 64 * 4
