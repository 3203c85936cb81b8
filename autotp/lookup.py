"""Find a parameter in a plan, and say why it is cut as it is."""

from __future__ import annotations

from difflib import get_close_matches

from autotp.errors import PlanError
from autotp.folding import fold_collectives, fold_rows, unfold_name
from autotp.plan_types import Collective, Plan, Row

_NEIGHBOURS = 8


def nearest(name: str, known: list[str], count: int = 3) -> list[str]:
    """Known names that end as `name` does (without `.weight` too), else those whose ends are spelled most like it."""
    parts = name.count(".") + 1
    by_tail: dict[str, str] = {}
    for other in known:
        for stem in (other, other.rpartition(".")[0] or other):
            by_tail.setdefault(".".join(stem.split(".")[-parts:]), other)
    same = [other for other in known if other.endswith((f".{name}", f".{name}.weight"))]
    close = [by_tail[tail] for tail in get_close_matches(name, by_tail, count, 0.6)]
    return same[:count] or list(dict.fromkeys(close))


def find_row(plan: Plan, name: str) -> Row:
    """The row of one parameter, also by its module's name or by a folded name as tables show it."""
    by_name = {row.name: row for row in plan.parameters}
    wanted = unfold_name(name)[0]
    for candidate in (name, wanted, f"{wanted}.weight", f"{wanted}.bias"):
        if candidate in by_name:
            return by_name[candidate]
    inside = [row.name for row in plan.parameters if row.name.startswith(wanted + ".")]
    if len(inside) == 1:
        return by_name[inside[0]]
    hints = inside[:_NEIGHBOURS] or nearest(wanted, list(by_name))
    told = "It holds: " if inside else "Did you mean: "
    way_out = told + ", ".join(hints) if hints else f"The plan has {len(by_name)} parameters; str(plan) lists them."
    raise PlanError(f"{name} is no parameter of {plan.model}. {way_out}", code="TP-NAME")


def explain(plan: Plan, name: str) -> str:
    """A row in words: what happens to it, why, and what its neighbours do."""
    row = find_row(plan, name)
    lines = [
        row.name,
        f"  style    {row.style}" + (f" (cut along dim {row.dim} over tp={plan.tp})" if row.is_cut else ""),
        f"  global   {shape_text(row.shape)} {row.dtype}",
        f"  rank 0   {shape_text(row.local_shape)}",
        f"  why      {row.reason}",
    ]
    if row.tied_to:
        lines.append(f"  tied to  {row.tied_to}: one tensor, cut once")
    lines += _findings(plan, row)
    others = [(other.name, f"{other.style}  {other.reason}") for other in neighbours(plan, row)]
    calls = [
        (call.module or "(model)", f"{call.kind} {call.when}, {call.bytes:,} bytes" + (f", {n} times" if n > 1 else ""))
        for call, n in fold_collectives(calls_around(plan, row))
    ]
    return "\n".join(lines + _listed("Neighbours", others) + _listed("Collectives of these modules", calls))


def _listed(title: str, pairs: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in pairs), default=0)
    return ["", title, *(f"  {name:<{width}}  {text}" for name, text in pairs)] if pairs else []


def _findings(plan: Plan, row: Row) -> list[str]:
    module = row.name.rpartition(".")[0]
    return [f"  {finding}" for finding in plan.findings if finding.where in (row.name, module) and finding.where]


def neighbours(plan: Plan, row: Row) -> list[Row]:
    """Other parameters of the nearest enclosing module that has any, folded."""
    for module in _enclosing(row.name):
        prefix = f"{module}." if module else ""
        near = [other for other in plan.parameters if other.name.startswith(prefix) and other.name != row.name]
        if near:
            return [folded for folded, _ in fold_rows(near)][:_NEIGHBOURS]
    return []


def calls_around(plan: Plan, row: Row) -> list[Collective]:
    """Calls at the parameter's module and at those that enclose it, the whole model left out if any other is found."""
    around = _enclosing(row.name)
    siblings = f"{around[1]}." if len(around) > 1 and around[1] else None
    found = [
        call for call in plan.collectives if call.module in around or (siblings and call.module.startswith(siblings))
    ]
    return [call for call in found if call.module] or found


def _enclosing(name: str) -> list[str]:
    """`a.b.c` -> `a.b`, `a`, ``."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def shape_text(shape: tuple[int, ...]) -> str:
    """`(64, 128)` -> `64x128`; a scalar is `()`."""
    return "x".join(map(str, shape)) or "()"
