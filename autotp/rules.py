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
        if style in _WHOLE:
            dims[name] = None
            continue
        found = roles.get(name, {})
        fits = [d for role in _ROLE_OF[style] for d, r in found.items() if r == role]
        here = {d: r for d, r in found.items() if r != "picked"}
        if style == "expertwise" and not fits and list(here.values()).count("out") > 1:
            fits = [min(d for d, r in here.items() if r == "out")]  # one product makes the features of all experts
        if fits:
            dims[name] = fits[0]
        elif style.startswith(("rowwise", "packed_rowwise")):
            dims[name] = None  # a bias of a row-cut layer is added once
        elif style == "expertwise":
            known = ", ".join(f"dim {d}: {r}" for d, r in sorted(here.items())) or "no product and no look-up reads it"
            raise RuleError(
                f"{name}: {rule} asks for expertwise, but nothing computes with one index of a dim of it at a time "
                f"({known}). Experts are weights of [experts, ...] that are multiplied group by group, in a batch, or "
                "looked up by an index of their first dim"
            )
        elif here:
            known = ", ".join(f"dim {d}: {r}" for d, r in sorted(here.items()))
            raise RuleError(f"{name}: {rule} asks for {style}, but its dims are {known}")
    forced.dims = dims
    return dims
