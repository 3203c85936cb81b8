"""Custom autograd functions: what is found out by trying them, and what must not be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import autotp
from autotp.ownership.choices import Choices
from autotp.ownership.discovery import Shown, shown
from autotp.ownership.engine import Ownership
from autotp.ownership.registry import RULES
from autotp.trace import trace
from tests.models.functions import Gelu, MeanBack, Rounded

STEPS = [0]
SEEN: list[float] = []
TABLE = torch.linspace(0, 1, 6)
WEIGHT = nn.Parameter(torch.ones(6))


class Plain(Function):
    """What the others change a part of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Any:
        ctx.rest, ctx.shape = rest, x.shape
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, *(None for _ in ctx.rest)


class Counts(Plain):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        STEPS[0] += 1
        return Plain.forward(ctx, x)


class Logs(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _log(grad.shape[0])
        return Plain.backward(ctx, grad)


def _log(x: float) -> None:
    SEEN.append(x)


class OnClass(Plain):
    last = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        OnClass.last += 1
        return Plain.forward(ctx, x)


class Clips(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1e6 / (grad.norm() + 1e-6)).clamp(max=1.0)


class Wide(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(-1, keepdim=True) if ctx.shape[-1] > 4000 else grad


class Branches(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.abs().max() if grad.abs().max() > 1e20 else grad


class Draws(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


class DrawsBefore(Plain):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Writes(Plain):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class WritesBack(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(2)


class Reads(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * WEIGHT


class Kernel(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return doubled(grad)


class Fails(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")


class Halves(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad[..., : grad.shape[-1] // 2], grad[..., grad.shape[-1] // 2 :] * 2], -1)


class Single(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(-1, keepdim=True) if grad.dtype == torch.float32 else grad


class Numbers(Plain):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.rest = ()
        return x * 2, 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * 2


class OneAlone(Function):
    """Mixes features in the gradient of its second operand, if only that has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad if ctx.needs_input_grad[0] else grad - grad.mean(-1, keepdim=True)


@torch.library.custom_op("autotp_functions::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = set(RULES)
    yield
    for known in [k for k in RULES if isinstance(k, type) and k not in before]:
        del RULES[known]


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, f: Callable[[Tensor], Any], width: int) -> None:
        super().__init__()
        self.a, self.b, self.f = nn.Linear(8, width), nn.Linear(width, 8), f

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.f(self.a(x)))


def _row(f: Callable[[Tensor], Any], width: int = 6) -> autotp.Row:
    return autotp.plan(Between(f, width), tp=2, sample=torch.zeros(3, 8)).row("a.weight")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Counts, "it changes what is kept outside of it"),
        (Logs, "it changes what is kept outside of it"),
        (OnClass, "it changes what is kept outside of it"),
        (Clips, "the gradients of pieces are not those of the whole"),
        (MeanBack, "the gradients of pieces are not those of the whole"),
        (Branches, "its backward goes by values that it computes"),
        (Draws, "its backward draws random numbers"),
        (DrawsBefore, "it draws random numbers"),
        (Writes, "it writes into what it is given"),
        (WritesBack, "its backward writes into what it is given"),
        (Reads, "its backward reads a tensor that is not among its arguments"),
        (Kernel, "its backward runs autotp_functions.doubled.default, of which nothing is known"),
        (Fails, "its backward cannot be run on small tensors (RuntimeError: needs a GPU)"),
        (Halves, "the gradients of pieces are not those of the whole"),
        (Single, "the gradients of pieces are not those of the whole (size 6, in its own dtype)"),
    ],
)
def test_a_function_that_hides_something_gets_whole_tensors_and_the_plan_says_why(function: Any, why: str) -> None:
    row = _row(function.apply)
    assert row.style == "colwise_gather_output"
    assert why in row.reason, row.reason


def test_a_backward_that_goes_by_the_size_is_tried_at_the_models() -> None:
    assert _row(Wide.apply).style == "colwise"
    assert _row(Wide.apply, 1 << 13).style == "colwise_gather_output"


@pytest.mark.parametrize("argument", [nn.ReLU(), lambda x: x, {"x": 1}, [torch.zeros(1)]])
def test_what_may_hold_anything_is_not_tried(argument: Any) -> None:
    row = _row(lambda x: Plain.apply(x, argument))
    assert row.style == "colwise_gather_output"
    assert "which may hold anything" in row.reason


def test_results_that_are_no_tensors_are_not_followed() -> None:
    assert "returns something else than new tensors" in _row(lambda x: Numbers.apply(x)[0]).reason


def test_operands_that_alone_want_a_gradient_are_tried_too() -> None:
    row = _row(lambda x: OneAlone.apply(x, x * 2))
    assert "the gradients of pieces are not those of the whole" in row.reason


def test_plain_arguments_and_kept_shapes_are_no_obstacle() -> None:
    row = _row(lambda x: Plain.apply(x, 3, (1.5, None), "mode", torch.float32))
    assert row.style == "colwise"
    assert "Plain keeps it cut, as was found by running it" in row.reason


def test_an_apply_that_was_kept_is_seen_and_left_as_it_was() -> None:
    before = vars(MeanBack)["forward"], torch.autograd.Function.__dict__["apply"]
    kept = MeanBack.apply
    assert _row(kept).style == "colwise_gather_output"
    assert (vars(MeanBack)["forward"], torch.autograd.Function.__dict__["apply"]) == before
    assert "forward" not in vars(Clips)  # it has that of the class it is made from


def test_a_gradient_is_tried_where_the_caller_records_none() -> None:
    class Later(MeanBack):
        pass

    record = trace(Between(Later.apply, 6), (torch.zeros(3, 8),), {})
    op = next(op for op in record.ops if str(op.func) == "Later")
    with torch.inference_mode():
        assert shown(Ownership(record, 2, Choices()), op) == (Shown((0,), (0,)),)


class Mapped(Gelu):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("function", [Mapped.apply, lambda x: Mapped.apply(x)])
def test_under_vmap_a_function_gets_whole_tensors(function: Any) -> None:
    assert _row(lambda x: torch.vmap(function)(x)).style == "colwise_gather_output"


# ---------------------------------------------------------------- what users say


def test_a_function_may_be_kept_whole() -> None:
    autotp.register_rule(Gelu, "whole")
    row = _row(Gelu.apply)
    assert row.style == "colwise_gather_output"
    assert "op Gelu gets whole tensors, by a rule that was registered" in row.reason


def test_what_goes_by_values_is_tried_if_the_user_asks_for_it() -> None:
    autotp.register_rule(Kernel)
    assert _row(Kernel.apply).style == "colwise"


def test_a_declaration_is_followed_and_checked() -> None:
    autotp.register_rule(Rounded, "... -> ...; cut ...")
    assert "found by running" not in _row(lambda x: Rounded.apply(x, 8, 1.0)).reason
    autotp.register_rule(MeanBack.apply, "... d -> ... d; cut ...")
    assert _row(MeanBack.apply).style == "colwise_gather_output"
    autotp.register_rule(MeanBack, "... d -> ... d; cut ... d")
    with pytest.raises(autotp.RuleError, match=r"MeanBack: the declaration .* the gradients of pieces are not"):
        _row(MeanBack.apply)


def test_what_cannot_be_tried_may_go_unchecked() -> None:
    autotp.register_rule(Fails, "... -> ...; cut ...")
    with pytest.raises(autotp.RuleError, match="needs a GPU"):
        _row(Fails.apply)
    autotp.register_rule(Fails, "... -> ...; cut ...", check=False)
    assert _row(Fails.apply).style == "colwise"


def test_a_rule_may_be_a_function_of_the_call() -> None:
    seen: list[autotp.OpView] = []

    def rule(view: autotp.OpView) -> str:
        seen.append(view)
        return "... -> ...; cut ..."

    autotp.register_rule(Rounded, rule)
    assert _row(lambda x: Rounded.apply(x, 8, 1.0)).style == "colwise"
    assert seen[0] == autotp.OpView(shapes={"x": (3, 6)}, results=((3, 6),), arguments={"steps": 8, "most": 1.0})


def test_a_rule_that_cannot_be_followed_is_no_secret() -> None:
    autotp.register_rule(Writes, "... -> ...; cut ...")
    with pytest.raises(autotp.RuleError, match="Writes: its rule cannot be followed, as it writes into"):
        _row(Writes.apply)
    with pytest.raises(autotp.RuleError, match="counts cannot be followed"):
        autotp.register_rule(Plain, "... -> ...; cut ...", counts={"n": "d"})
