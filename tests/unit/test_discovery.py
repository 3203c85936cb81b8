"""What running an operation on small tensors shows of it. Operations that hide something must show nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision  # noqa: F401  (defines operations)
from torch import Tensor, nn

import autotp
from autotp.ownership.choices import Choices
from autotp.ownership.discovery import Shown, shown
from autotp.ownership.engine import Ownership
from autotp.ownership.registry import RULES
from autotp.trace import trace

_aten, _vision = torch.ops.aten, torch.ops.torchvision


class Applied(nn.Module):
    """One operation on inputs and parameters."""

    def __init__(self, f: Callable[..., Any], *weights: Tensor) -> None:
        super().__init__()
        self.f, self.weights = f, nn.ParameterList(weights or [torch.zeros(1)])
        self.used = bool(weights)

    def forward(self, *xs: Tensor) -> Any:
        return self.f(*xs, *(self.weights if self.used else ()))


def found(f: Callable[..., Any], *xs: Tensor, weights: tuple[Tensor, ...] = ()) -> tuple[Shown, ...]:
    """What is shown of the last operation that ``f`` runs."""
    record = trace(Applied(f, *weights), xs, {})
    return shown(Ownership(record, 2, Choices()), record.ops[-1])


def test_what_ends_the_process_apart_shows_nothing_and_harms_nobody() -> None:
    boxes = torch.tensor([[0.0, 0.0, 0.0, 3.0, 3.0, 0.0]])  # the first number of a box is that of its image
    assert found(lambda x: _vision.ps_roi_align(x, boxes[:, :5], 1.0, 2, 2, 2), torch.zeros(1, 8, 8, 8)) == ()
    assert test_segments_keep_their_features() is None


def test_segments_keep_their_features() -> None:
    lengths = torch.tensor([2, 1, 3])
    got = found(lambda x: torch.segment_reduce(x, "sum", lengths=lengths, axis=0), torch.zeros(6, 5))
    assert got == (Shown((1, None), (1,)),)


def test_losses_per_example_and_their_sum() -> None:
    target = torch.tensor([1, 0, 2, 2])
    per_example = found(lambda x: nn.functional.nll_loss(x, target, reduction="none"), torch.zeros(4, 5))
    assert Shown((0, 0), (0, None)) in per_example
    assert found(lambda x: nn.functional.nll_loss(x, target), torch.zeros(4, 5)) == ()


def test_square_tensors_are_told_apart() -> None:
    got = found(lambda a, b: _aten._cdist_forward(a, b, 2.0, None), torch.zeros(4, 4), torch.zeros(4, 4))
    assert got == (Shown((0, None), (0,)), Shown((None, 0), (1,)))


def test_large_tensors_are_made_small() -> None:
    lengths = torch.tensor([2, 1, 3])
    got = found(lambda x: torch.segment_reduce(x, "max", lengths=lengths, axis=0), torch.zeros(6, 1 << 15))
    assert got == (Shown((1, None), (1,)),)


# ---------------------------------------------------------------- what hides something


def large(x: Tensor) -> Tensor:
    return torch.where((x.abs() > 3).any(), x.sort(-1)[0], x)


def many(x: Tensor) -> Tensor:
    return x.sort(-1)[0] if x.shape[-1] >= 8 else x.clone()


def few(x: Tensor) -> Tensor:
    return x.sort(-1)[0] if x.shape[-1] < 3 else x.clone()


def tied(x: Tensor) -> Tensor:
    return x + (x.unique().numel() < x.numel())


def negative(x: Tensor) -> Tensor:
    return x + (x.max(-1, keepdim=True)[0] < 0)


def zeros(x: Tensor) -> Tensor:
    return x + (x == 0).all(-1, keepdim=True)


def single(x: Tensor) -> Tensor:
    return x.sort(-1)[0] if x.dtype == torch.float32 else x.clone()


def faint(x: Tensor) -> Tensor:
    return x + 1e-6 * x.sum(-1, keepdim=True)


def drawn(x: Tensor) -> Tensor:
    return x + torch.rand((*x.shape[:-1], 1))


def counting(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x + len(CALLS)


def first_differs(x: Tensor) -> Tensor:
    out = x.clone()
    out[..., 0] *= 2
    return out


def local_mean(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def plain(x: Tensor) -> Tensor:
    return x.sin()


def mixed_backward(x: Tensor) -> Tensor:
    return x.clone()


CALLS: list[int] = []
HIDING = (large, many, few, tied, negative, zeros, single, faint, drawn, counting, first_differs, local_mean)
OPS: dict[str, Any] = {}
for _f in (*HIDING, plain, mixed_backward):
    OPS[_f.__name__] = torch.library.custom_op(f"autotp_hiding::{_f.__name__}", _f, mutates_args=())
    OPS[_f.__name__].register_fake(lambda x: torch.empty_like(x))
OPS["mixed_backward"].register_autograd(
    lambda ctx, g: g.sum(-1, keepdim=True).expand_as(g), setup_context=lambda ctx, inputs, output: None
)
OPS["plain"].register_autograd(
    lambda ctx, g: g * ctx.x.cos(), setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0])
)


@pytest.mark.parametrize("name", [f.__name__ for f in HIDING] + ["mixed_backward"])
def test_an_operation_that_mixes_only_at_times_is_not_cut_there(name: str) -> None:
    assert all(s.operands != (1,) for s in found(lambda x: OPS[name](x), torch.zeros(3, 5)))


def test_one_that_hides_nothing_is_shown_to_hide_nothing() -> None:
    assert found(lambda x: OPS["plain"](x), torch.zeros(3, 5)) == (Shown((0,), (0,)), Shown((1,), (1,)))


# ---------------------------------------------------------------- in plans


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in [n for n in RULES if str(n).startswith("autotp_hiding::")]:
        del RULES[name]


class Between(nn.Module):
    """An operation between two layers."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.f = nn.Linear(8, 6), nn.Linear(6, 8), f

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.f(self.a(x)))


def _row(name: str) -> autotp.Row:
    return autotp.plan(Between(lambda h: OPS[name](h)), tp=2, sample=torch.zeros(3, 8)).row("a.weight")


def test_operations_of_others_are_not_run_unasked() -> None:
    before = len(CALLS)
    assert "has no rule" in _row("counting").reason
    assert len(CALLS) == before


def test_they_are_tried_if_the_user_asks_for_it() -> None:
    autotp.register_rule(OPS["plain"])
    row = _row("plain")
    assert row.style == "colwise"
    assert "autotp_hiding.plain keeps it cut, as was found by running it" in row.reason
    autotp.register_rule("autotp_hiding::large")
    assert _row("large").style == "colwise_gather_output"


def test_counts_need_a_declaration() -> None:
    with pytest.raises(autotp.RuleError, match="must be a declaration"):
        autotp.register_rule(OPS["plain"], counts={"n": "d"})
