"""The user's own choices: glob rules, a plan, a smallest size. They win over the analysis, and are proved like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from autotp.errors import PlanError, RuleError
from autotp.lookup import nearest
from autotp.plan_types import STYLES, Finding, Plan, Row
from autotp.search import Analysis

_ROLE_OF = {
    "colwise": ("out", "batch", "features"),
    "colwise_gather_output": ("out",),
    "packed_colwise": ("out", "batch"),
    "packed_colwise_gather_output": ("out",),
    "rowwise": ("in", "rows"),
    "rowwise_split_input": ("in",),
    "packed_rowwise": ("in",),
    "embedding_rowwise": ("rows", "out"),
    "embedding_colwise": ("features", "in"),
    "expertwise": ("expert", "batch", "picked"),
}
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "gathered_at_use", "sequence_parallel"}


@dataclass
class Forced:
    """Styles by parameter name, each with what asked for it."""

    styles: dict[str, tuple[str, str]] = field(default_factory=dict)
    dims: dict[str, int | None] = field(default_factory=dict)
    by_size: set[str] = field(default_factory=set)
    notes: list[Finding] = field(default_factory=list)
    beside: set[str] = field(default_factory=set)  # what is matched beside weights, and goes with them: biases, norms
    saved: dict[str, int | None] = field(default_factory=dict)  # the dims of a plan's rows
    closed: frozenset[str] = frozenset()  # modules whose outputs are gathered in any case
    counted: frozenset[Any] = frozenset()  # calls that count what is cut, as the plan's check found

    def follow(
        self,
        dims: Mapping[str, int | None],
        notes: Sequence[Finding],
        *,
        closed: frozenset[str],
        counted: frozenset[Any],
    ) -> None:
        """Take over all choices of a plan that says of every parameter along which dim it is cut."""
        self.styles.update(dict.fromkeys(dims, ("this cut", "the plan")))
        self.dims.update(dims)
        self.notes += notes
        self.closed, self.counted = closed, counted

    @property
    def at_rest(self) -> dict[str, int | None]:
        """Parameters to be kept in parts and put together for use, each with the dim to cut (None: any)."""
        return {n: self.saved.get(n) for n, (style, _) in self.styles.items() if style == "gathered_at_use"}

    def findings(self) -> list[Finding]:
        return self.notes

    def named(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows under the style that was asked for where it is another word for what a batch of matrices got."""
        asked = {n for n, (style, _) in self.styles.items() if style == "expertwise"}
        return tuple(replace(r, style="expertwise") if r.name in asked and r.is_cut else r for r in rows)

    def check(self, analysis: Analysis) -> None:
        """Raise if a choice could not be followed."""
        for name, dim in self.dims.items():
            tid = analysis.trace.leaves[name]
            got = analysis.own.cut.get(tid)
            if dim is not None and got != dim and name in self.styles:
                style, rule = self.styles[name]
                reasons = analysis.own.reasons.get(tid, [])
                last = reasons[-1] if reasons else "it does not fit what computes with it"
                why = analysis.notes.get(tid) or last
                raise RuleError(
                    f"{name}: {rule} asks for {style}, which cannot be proved: {why}. "
                    "Take the rule out, or use another style."
                )
        self._check_beside(analysis)

    def _check_beside(self, analysis: Analysis) -> None:
        """Say which parameters a rule matched without cutting them, as they only go with the weights it is for.

        That is an error for a matrix, and for what a rule matches without matching a weight.
        """
        cut = {n for n in self.styles if analysis.own.cut.get(analysis.trace.leaves[n]) is not None}
        followed = {rule for n, (_, rule) in self.styles.items() if n in cut or n not in self.beside}
        left: dict[str, list[str]] = {}
        for name in sorted(self.beside - cut):
            style, rule = self.styles[name]
            matrix = len(analysis.trace.tensors[analysis.trace.leaves[name]].shape) > 1
            if name not in self.dims and (matrix or rule not in followed):
                raise RuleError(_misfit(name, style, rule, {}))
            left.setdefault(f"{rule} ({style})", []).append(name)
        for rule, names in left.items():
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            text = f"{rule} also matches what is no weight of a layer, and is not cut by it: {shown}"
            self.notes.append(Finding(code="TP-RULE", level="note", where="", message=text))


def resolve(
    model: nn.Module, rules: Mapping[str, str] | None, plan: Plan | str | Path | None, min_bytes: int
) -> Forced:
    """Match rules and plan rows against the model's parameters.

    Raises:
        RuleError: a rule that matches nothing (with the nearest names) or names no style.
        PlanError: a plan for another model.
    """
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    forced = Forced()
    if plan is not None:
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        _from_plan(loaded, shapes, forced)
    for glob, style in (rules or {}).items():
        _from_rule(glob, style, shapes, forced)
    for name, p in model.named_parameters(remove_duplicate=False):
        if min_bytes and p.numel() * p.element_size() < min_bytes and name not in forced.styles:
            forced.by_size.add(name)
    return forced


def _from_rule(glob: str, style: str, shapes: Mapping[str, Any], forced: Forced) -> None:
    if style not in STYLES:
        hint = ", ".join(nearest(style, list(STYLES))) or ", ".join(STYLES)
        raise RuleError(f"rule {glob!r}: {style!r} is no style. Did you mean: {hint}")
    if style == "sequence_parallel":
        raise RuleError(
            f"rule {glob!r}: sequence_parallel is no choice for single parameters; pass sequence_parallel=True (--sp), "
            "and norms get it where tokens can be cut"
        )
    hit = [n for n in shapes if fnmatchcase(n, glob) or fnmatchcase(n.rpartition(".")[0], glob)]
    if not hit:
        hint = ", ".join(nearest(glob, list(shapes), 5)) or "none is similar"
        raise RuleError(f"rule {glob!r} ({style}) matches no parameter and no module. Nearest names: {hint}")
    for n in hit:
        if n in forced.styles and forced.styles[n][0] != style:
            before = forced.styles[n][1]
            text = f"{before} and rule {glob!r} both match; the later one counts ({style})"
            forced.notes.append(Finding(code="TP-OVERLAP", level="note", where=n, message=text))
        forced.styles[n] = (style, f"rule {glob!r}")
    text = f"rule {glob!r} ({style}) matches {len(hit)} parameters"
    forced.notes.append(Finding(code="TP-RULE", level="note", where="", message=text))


def _from_plan(plan: Plan, shapes: Mapping[str, Any], forced: Forced) -> None:
    rows = {r.name: r for r in plan.parameters}
    missing = [n for n in rows if n not in shapes]
    extra = [n for n in shapes if n not in rows]
    if missing or extra:
        raise PlanError(
            f"the plan is for another model ({plan.model}): it has {len(missing)} parameters the model lacks "
            f"({', '.join(missing[:3])}) and lacks {len(extra)} of the model's ({', '.join(extra[:3])})"
        )
    for n, r in rows.items():
        if tuple(r.shape) != shapes[n]:
            raise PlanError(f"the plan does not fit: {n} is {list(r.shape)} in it and {list(shapes[n])} in the model")
        forced.styles[n] = (r.style, "the plan")
        forced.dims[n] = r.dim if r.style not in _WHOLE else None
        forced.saved[n] = r.dim


def choices_of(model: nn.Module, forced: Forced, roles: Mapping[str, Mapping[int, str]]) -> dict[str, int | None]:
    """The forced dim of every parameter that has one; ``roles`` says what each dim is to its layer."""
    dims = dict(forced.dims)
    for name in forced.by_size:
        dims[name] = None
    for name, (style, rule) in forced.styles.items():
        if name in forced.dims and rule == "the plan":
            continue
        fit = _fitting(style, roles.get(name, {}))
        known = {d: r for d, r in roles.get(name, {}).items() if r != "picked"}
        added = _adds(name, style, roles)
        if style in _WHOLE:
            dims[name] = None
        elif fit is not None:
            dims[name] = fit
        elif style == "expertwise" or (known and not added):
            raise RuleError(_misfit(name, style, rule, known))
        else:
            forced.beside.add(name)
            if _ROLE_OF[style][0] in ("in", "rows") and added:
                dims[name] = None  # a bias of a row-cut layer is added once
    forced.dims = dims
    return dims


def _fitting(style: str, roles: Mapping[int, str]) -> int | None:
    """The dim of a parameter that a style cuts; None if it has no such dim, or is to be whole."""
    for role in _ROLE_OF.get(style, ()):
        if role in roles.values():
            return next(d for d, r in roles.items() if r == role)
    outs = [d for d, r in roles.items() if r == "out"]
    return min(outs) if style == "expertwise" and len(outs) > 1 else None  # one product for the features of all


def _adds(name: str, style: str, roles: Mapping[str, Mapping[int, str]]) -> bool:
    """Whether a parameter goes with another one of its module that the style fits, as a bias does."""
    if "in" in roles.get(name, {}).values():
        return False
    home = name.rpartition(".")[0]
    others = (r for n, r in roles.items() if n != name and n.rpartition(".")[0] == home)
    return any(_fitting(style, r) is not None for r in others)


def _misfit(name: str, style: str, rule: str, known: Mapping[int, str]) -> str:
    text = ", ".join(f"dim {d}: {r}" for d, r in sorted(known.items()))
    text = text or "no product with activations and no embedding reads it"
    if style == "expertwise":
        return (
            f"{name}: {rule} asks for expertwise, but nothing computes with one index of a dim of it at a time "
            f"({text}). Experts are weights of [experts, ...] that are multiplied group by group, in a batch, or "
            "looked up by an index of their first dim"
        )
    if known:
        return f"{name}: {rule} asks for {style}, but its dims are {text}"
    return (
        f"{name}: {rule} asks for {style}, which says nothing of it: it is no weight of a layer ({text}). "
        "It may be replicate or gathered_at_use; a narrower rule leaves it out"
    )
