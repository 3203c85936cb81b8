"""Which rule an operation has: by name, by torch's pointwise tag, found by trial, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotp import torch_ops
from autotp.record import Op

if TYPE_CHECKING:
    from autotp.ownership.engine import Ownership

Rule = Callable[["Ownership", Op], None]
RULES: dict[Any, Rule] = {}


def rule(*packets: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations by name (aten's, or ``namespace::name``)."""

    def register(f: Rule) -> Rule:
        for name in packets:
            RULES[name if "::" in name else f"aten::{name}"] = f
        return f

    return register


CallRule = Callable[["Ownership", Any], bool]
CALL_RULES: dict[Any, CallRule] = {}


def call_rule(*functions: Any) -> Callable[[CallRule], CallRule]:
    """Register a rule for whole calls of torch functions; where it says False, the operations inside are gone through.

    Only for calls that a rank replaces as a whole.
    """

    def register(f: CallRule) -> CallRule:
        CALL_RULES.update(dict.fromkeys(functions, f))
        return f

    return register


def rule_of(func: Any) -> Rule | None:
    """The rule registered for an operation, if any."""
    return RULES.get(func.overloadpacket._qualified_op_name)


def find_rule(op: Op) -> Rule:
    """The rule for an operation: by name, by torch's pointwise tag, by trial, else everything whole."""
    from autotp.ownership import rules  # noqa: F401  (fills the table)
    from autotp.ownership.discovery import by_trial, may_be_tried
    from autotp.ownership.rules_pointwise import pointwise

    func = torch_ops.functional(op.func)
    found = rule_of(op.func) or rule_of(func)
    if found is not None:
        return found
    if torch_ops.is_pointwise(func):
        return pointwise
    return by_trial if may_be_tried(op.func) else no_rule


def no_rule(own: Ownership, op: Op, why: str = "") -> None:
    """Everything whole, with the operation as the reason."""
    own.all_whole(op, f"op {op.func} has no rule{why}")


def kept_whole(own: Ownership, op: Op) -> None:
    """Everything whole, as the user said."""
    own.all_whole(op, f"op {op.func} gets whole tensors, by a rule that was registered")
