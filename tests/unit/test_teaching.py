"""What `register_rule` refuses, at once and while planning; declarations as text and as functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.ownership.declaration import parse, spelled
from autotp.ownership.registry import RULES


def _scaled(x: Tensor, s: Tensor, n: int) -> Tensor:
    return x * s * n


def scaled(x: Tensor, s: Tensor, n: int = 1) -> Tensor:
    return _scaled(x, s, n)


def sorted_when_large(x: Tensor, s: Tensor) -> Tensor:
    return torch.where((x.abs() > 3).any(), x.sort(-1)[0], x) * s


def sorted_when_many(x: Tensor, s: Tensor) -> Tensor:
    return (x.sort(-1)[0] if x.shape[-1] >= 8 else x) * s


def wrong_gradient(x: Tensor, s: Tensor) -> Tensor:
    return x * s


def counted(x: Tensor, n: int) -> Tensor:
    if x.shape[-1] != n:
        raise ValueError(f"expected {n}")
    return x.exp()


def with_state(x: Tensor) -> Tensor:
    return x + torch.rand(())


def with_bias(x: Tensor, s: Tensor) -> Tensor:
    return x * s.sum() + s.sum() + x.sum(-1, keepdim=True)


def written(x: Tensor) -> None:
    x.zero_()


def listed(xs: list[Tensor]) -> Tensor:
    return torch.cat(xs)


def _op(f: Any, mutates: tuple[str, ...] = ()) -> Any:
    op = torch.library.custom_op(f"autotp_unit::{f.__name__}", f, mutates_args=mutates)
    if not mutates and f is not listed:
        op.register_fake(lambda x, *_: torch.empty_like(x))
    return op


OPS = {
    f.__name__: _op(f)
    for f in (scaled, sorted_when_large, sorted_when_many, wrong_gradient, counted, with_state, with_bias)
}
WRITTEN, LISTED = _op(written, ("x",)), _op(listed)
OPS["wrong_gradient"].register_autograd(
    lambda ctx, g: (g.sum(-1, keepdim=True).expand_as(g), g.flatten(0, -2).sum(0)),
    setup_context=lambda ctx, inputs, output: None,
)


class Model(nn.Module):
    """An operation between two layers."""

    def __init__(self, name: str, *rest: Any) -> None:
        super().__init__()
        self.a, self.b, self.s = nn.Linear(8, 6), nn.Linear(6, 8), nn.Parameter(torch.ones(6))
        self.name, self.rest = name, rest

    def forward(self, x: Tensor) -> Tensor:
        scale = () if self.name in ("counted", "with_state") else (self.s,)
        return self.b(OPS[self.name](self.a(x), *scale, *self.rest))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in [n for n in RULES if str(n).startswith("autotp_unit::")]:
        del RULES[name]


def _plan(name: str, *rest: Any) -> autotp.Plan:
    return autotp.plan(Model(name, *rest), tp=2, sample=torch.zeros(3, 8))


def test_an_operation_without_a_rule_gets_whole_tensors() -> None:
    plan = _plan("scaled", 2)
    assert plan.row("a.weight").style == "colwise_gather_output"
    assert "autotp_unit.scaled.default has no rule" in plan.row("a.weight").reason


def test_a_taught_one_keeps_the_cut() -> None:
    autotp.register_rule("autotp_unit::scaled", "... d, d -> ... d; cut d")
    plan = _plan("scaled", 2)
    assert [plan.row(n).style for n in ("a.weight", "b.weight", "s")] == ["colwise", "rowwise", "colwise"]


def test_a_rule_may_be_a_function_of_the_call() -> None:
    seen: list[autotp.OpView] = []

    def rule(view: autotp.OpView) -> str:
        seen.append(view)
        return "b d, d -> b d; cut d" if view.arguments["n"] == 2 else "b d, d -> b d; cut b"

    autotp.register_rule(OPS["scaled"], rule)
    assert _plan("scaled", 2).row("a.weight").style == "colwise"
    assert seen[0] == autotp.OpView(shapes={"x": (3, 6), "s": (6,)}, results=((3, 6),), arguments={"n": 2})
    assert _plan("scaled", 3).row("a.weight").style == "colwise_gather_output"


@pytest.mark.parametrize(
    ("name", "rest", "rule", "why"),
    [
        ("sorted_when_large", (), "... d, d -> ... d; cut d", "pieces do not give the pieces of the result"),
        ("sorted_when_many", (), "... d, d -> ... d; cut d", "pieces do not give the pieces of the result"),
        ("wrong_gradient", (), "... d, d -> ... d; cut d", "the gradients of pieces are not those of the whole"),
        ("with_bias", (), "b d, e -> b d; sum e", "the results of pieces do not add up"),
        ("counted", (6,), "... d -> ... d; cut d", "it fails on"),
        ("with_state", (), "... d -> ... d; cut d", "it gives another result each time"),
        ("scaled", (2,), "b d, s -> b d; cut b s", "every result must have it"),
        ("scaled", (2,), "b d, b -> b d; cut b", "'b' is 3 and 6 in one call"),
        ("scaled", (2,), "b t d, d -> b t d; cut b", "names 3 dims in 'b t d', the tensor has 2"),
    ],
)
def test_a_wrong_declaration_is_refused(name: str, rest: tuple[int, ...], rule: str, why: str) -> None:
    with pytest.raises(autotp.RuleError) as error:
        autotp.register_rule(OPS[name], rule)
        _plan(name, *rest)
    assert why in str(error.value)
    assert f"autotp_unit::{name}" in str(error.value)


def test_what_cannot_be_tried_may_go_unchecked() -> None:
    autotp.register_rule(OPS["with_state"], "... d -> ... d; cut d", check=False)
    assert _plan("with_state").row("a.weight").style == "colwise"


def test_counts_are_scaled() -> None:
    autotp.register_rule(OPS["counted"], "... d -> ... d; cut d", counts={"n": "d"})
    assert _plan("counted", 6).row("a.weight").style == "colwise"


@pytest.mark.parametrize(
    ("op", "rule", "options", "why"),
    [
        ("mylib::nothing", "a -> a; cut a", {}, "no operation that torch knows"),
        ("nothing", "a -> a; cut a", {}, "no operation that torch knows"),
        (torch.relu, "a -> a; cut a", {}, "is no operation"),
        ("aten::softmax", "a -> a; cut a", {}, "has a rule of autotp's own"),
        (WRITTEN, "a -> a; cut a", {}, "writes into one of its arguments"),
        (LISTED, "a -> a; cut a", {}, "a list of tensors"),
        (OPS["scaled"], "a -> a; cut a", {}, r"1 operands and 1 results.*2 tensor arguments \(x, s\)"),
        (OPS["scaled"], 3, {}, "must be a declaration or a function"),
        (OPS["scaled"], "a, a -> a; cut a", {"counts": {"m": "a"}}, "its integer arguments are: n"),
        (OPS["scaled"], "a, a -> a; cut a", {"counts": {"n": "b"}}, "n counts 'b'"),
    ],
)
def test_a_wrong_registration_is_refused(op: Any, rule: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(autotp.RuleError, match=why):
        autotp.register_rule(op, rule, **options)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a b", "one '->'"),
        ("a -> a", "no clause says"),
        ("a -> a; cut", "is no clause"),
        ("a -> a; split a", "is no clause"),
        ("a a -> a; cut a", "a name stands twice"),
        ("a b ... -> a; cut a", "it must come first"),
        ("a-b -> a; cut a", "is no name"),
        ("heads -> heads; cut head", "did you mean heads"),
        ("a b -> b; cut a", "every result must have it"),
        ("a -> a; cut a; sum a", "cannot be both"),
        ("a b -> a b; sum b", "must not have it"),
    ],
)
def test_text_that_is_no_declaration(text: str, why: str) -> None:
    with pytest.raises(autotp.RuleError, match=why):
        parse(text, "mylib::op")


def test_leading_dims_are_counted_from_the_right() -> None:
    assert spelled(("...", "d"), 3, "", "") == ("...2", "...1", "d")
    assert spelled(("...", "d"), 1, "", "") == ("d",)
