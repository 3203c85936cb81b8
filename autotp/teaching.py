"""`autotp.register_rule`: teach autotp an operation that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from autotp.errors import RuleError
from autotp.functions import is_function
from autotp.ownership.declaration import Declaration, parse
from autotp.ownership.discovery import by_trial
from autotp.ownership.registry import RULES, kept_whole
from autotp.ownership.rules_taught import OpView, Teaching, taught

_GUIDE = "See docs/teaching-operations.md."


def register_rule(
    op: Any,
    rule: str | Callable[[OpView], str] | None = None,
    *,
    counts: Mapping[str, str] | None = None,
    check: bool = True,
) -> None:
    """Tell autotp along which dims an operation may be cut. Holds for this process, for all plans made afterwards.

        autotp.register_rule("mylib::decay", "b t d, d -> b t d; cut b d")

    Args:
        op: the operation: ``"namespace::name"``, what ``torch.library.custom_op`` returned, ``torch.ops.mylib.op``, or
            the class of a ``torch.autograd.Function``.
        rule: names for the dims of every tensor argument and result, and what holds for them. ``cut NAMES``: the
            operation on some indices of that dim gives the result at these indices, forward and backward.
            ``sum NAMES``: the result is the sum of the operation's results on parts of that dim. All other dims are
            kept whole. A function instead gets each call as an :class:`OpView` and gives such a text. Left out: what
            may be cut is found out by running the operation on small random tensors. What it does on values and sizes
            that are not drawn is then taken on trust. ``"whole"``: it gets whole tensors, and is not tried.
        counts: integer arguments that count a dim, as ``{"num_heads": "h"}``: a rank is given its share of them.
        check: try the declaration on small random tensors, the first time that the operation is met in a model.

    Raises:
        RuleError: an operation that is unknown, has a rule of autotp's own, writes into its arguments, gives views or
            takes lists of tensors; a declaration that cannot be read or does not fit the operation. While planning: a
            declaration that does not fit a call's shapes, or that ``check`` finds to be wrong.
    """
    key, schemas = _operation(op)
    name = key if isinstance(key, str) else key.__name__
    known = RULES.get(key)
    if known not in (None, by_trial, kept_whole) and not (isinstance(known, partial) and known.func is taught):
        raise RuleError(f"{name} has a rule of autotp's own: it needs no other")
    for schema in schemas:
        _check_schema(name, schema)
    if counts and is_function(key):
        raise RuleError(f"{name} is an autograd function, whose arguments cannot be changed: counts cannot be followed")
    if (rule is None or rule == "whole") and not counts:
        RULES[key] = by_trial if rule is None else kept_whole
        return
    if isinstance(rule, str):
        declaration = parse(rule, name)
        for schema in schemas:
            _fits(name, schema, declaration, dict(counts or {}))
    elif not callable(rule):
        raise RuleError(f"{name}: the rule must be a declaration or a function that gives one, not {rule!r}. {_GUIDE}")
    RULES[key] = partial(taught, teaching=Teaching(name=name, rule=rule, counts=dict(counts or {}), check=check))


def _operation(op: Any) -> tuple[Any, list[Any]]:
    """Qualified name and schemas of an operation, however it was given; an autograd function goes by its class."""
    function = getattr(op, "__self__", op)  # what may be given is its apply
    if is_function(function):
        return function, []
    if isinstance(op, str):
        space, _, short = op.partition("::")
        packet = getattr(getattr(torch.ops, space, None), short, None) if space and short else None
        if packet is None:
            raise RuleError(
                f"{op!r} is no operation that torch knows. Write 'namespace::name', and import what defines it first"
            )
    else:
        packet = getattr(op, "_opoverload", op)
        packet = getattr(packet, "overloadpacket", packet)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise RuleError(
            f"{op!r} is no operation: give 'namespace::name', a torch.library.custom_op, torch.ops.NAMESPACE.NAME or a "
            "torch.autograd.Function. Python functions need no rule: what they call is looked at"
        )
    return packet._qualified_op_name, [getattr(packet, o)._schema for o in packet.overloads()]


def _check_schema(name: str, schema: Any) -> None:
    for a in (*schema.arguments, *schema.returns):
        if a.alias_info is not None:
            what = "writes into" if a.alias_info.is_write else "gives a view of"
            raise RuleError(f"{name} {what} one of its arguments: only operations that make new tensors can be taught")
        if "Tensor" in str(a.type) and ("List" in str(a.type) or "[]" in str(a.type)):
            raise RuleError(f"{name} takes or gives a list of tensors ({a.name}), which no declaration can name")


def _fits(name: str, schema: Any, d: Declaration, counts: dict[str, str]) -> None:
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    if len(tensors) != len(d.operands) or len(schema.returns) != len(d.results):
        raise RuleError(
            f'{name}: "{d.text}" has {len(d.operands)} operands and {len(d.results)} results, the operation has '
            f"{len(tensors)} tensor arguments ({', '.join(tensors)}) and returns {len(schema.returns)}. {_GUIDE}"
        )
    integers = [a.name for a in schema.arguments if str(a.type) in ("int", "Optional[int]")]
    for argument, dim in counts.items():
        if argument not in integers:
            raise RuleError(
                f"{name}: counts names {argument!r}; its integer arguments are: {', '.join(integers) or 'none'}"
            )
        if dim not in d.cut | d.sums:
            raise RuleError(f'{name}: counts says that {argument} counts {dim!r}, which no clause of "{d.text}" names')


__all__ = ["OpView", "register_rule"]
