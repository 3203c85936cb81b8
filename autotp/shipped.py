"""Our plan beside the `tp_plan` that transformers ships for a model, parameter by parameter.

What is compared is what a rank keeps (cut or not, along which dim, in how many pieces) and where a cut is closed:
`gathered` rows cut the same weight, but one of the two puts the activation together right after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotp import foreign
from autotp.errors import PlanError
from autotp.folding import fold_names
from autotp.foreign import GATHERS, KNOWN, SPLITS, Claim, Claims, ForeignPlan
from autotp.plan_types import Finding, Plan, Row

if TYPE_CHECKING:
    from torch import nn

SAME, OURS, THEIRS, GATHERED, OTHER, UNKNOWN = (
    "same",
    "ours only",
    "theirs only",
    "gathered",
    "cut otherwise",
    "unknown",
)
KINDS = (THEIRS, UNKNOWN, OTHER, GATHERED, OURS, SAME)
_CLOSED = GATHERS | SPLITS | {"packed_colwise_gather_output", "gathered_at_use"}
_BETWEEN = {"embedding_colwise"}  # always gathered, so there is nothing to tell apart


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One parameter: the style it has in either plan (theirs is empty where no row names it), and how they compare."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    ours: str
    theirs: str
    kind: str
    note: str = ""
    theirs_cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both plans of one model. `findings`: what is wrong with theirs at this number of ranks, and rows without use."""

    plan: Plan
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many parameters there are of each kind."""
        found = Counter(pair.kind for pair in self.pairs)
        return {kind: found[kind] for kind in KINDS}

    @property
    def theirs_cut_share(self) -> float:
        """Share of the bytes of weight matrices that their plan cuts."""
        matrices = [pair for pair in self.pairs if len(pair.shape) >= 2]
        total = sum(pair.bytes for pair in matrices)
        return sum(pair.bytes for pair in matrices if pair.theirs_cut) / total if total else 0.0

    @property
    def ok(self) -> bool:
        """Whether theirs cuts nothing that ours leaves whole, is sound, and has no style that is unknown."""
        return not (self.counts[THEIRS] or self.counts[UNKNOWN] or any(f.level == "error" for f in self.findings))

    def folded(self) -> list[tuple[Pair, str, int]]:
        """(first of them, folded name, how many) of like parameters, differences first."""
        keys = [(p.name, (p.kind, p.ours, p.theirs, p.note, p.shape)) for p in self.pairs]
        folds = [(self.pairs[f.members[0]], f.pattern, len(f.members)) for f in fold_names(keys)]
        return sorted(folds, key=lambda fold: KINDS.index(fold[0].kind))

    def to_dict(self) -> dict[str, Any]:
        """What `autotp plan --diff-shipped --json` prints."""
        return {
            "schema": 1,
            "model": self.plan.model,
            "mesh": dict(self.plan.mesh),
            "counts": self.counts,
            "cut_share": {"ours": self.plan.cut_share, "theirs": self.theirs_cut_share},
            "parameters": [
                {"name": p.name, "shape": list(p.shape), "ours": p.ours, "theirs": p.theirs, "kind": p.kind,
                 "note": p.note}
                for p in self.pairs
            ],
            "findings": [vars(finding).copy() for finding in self.findings],
        }  # fmt: skip


def compare(model: nn.Module, plan: Plan, sample: Any = None) -> Comparison:
    """Compare `plan`, made for `model`, with what transformers ships for it.

    Raises:
        PlanError: transformers has no plan for this model.
    """
    rows = shipped_rows(model)
    known = {key: style for key, style in rows.items() if style in KNOWN}
    claims = foreign.resolve(model, ForeignPlan(rows=tuple(rows.items())))
    pairs = tuple(_pair(row, claims) for row in plan.parameters if row.tied_to is None)
    findings = [_unknown(key, style) for key, style in rows.items() if key not in known]
    return Comparison(plan=plan, pairs=pairs, findings=(*findings, *_verdict(model, known, plan.tp, sample)))


def shipped_rows(model: nn.Module) -> dict[str, str]:
    """The `tp_plan` of a transformers model, as the model itself has put it together from its parts' plans."""
    rows = getattr(model, "tp_plan", None)
    if not isinstance(rows, Mapping) or not rows:
        raise PlanError(
            f"transformers ships no tp_plan for {type(model).__name__}, so there is nothing to compare with",
            code="TP-NO-SHIPPED",
        )
    return {str(key): str(style) for key, style in rows.items()}


def _verdict(model: nn.Module, rows: Mapping[str, str], tp: int, sample: Any) -> list[Finding]:
    """What is wrong with their plan over this many ranks."""
    if tp == 1 or not rows:
        return []
    from autotp.foreign_proof import judge
    from autotp.planning import example

    args, kwargs, record = example(model, sample)
    verdict, _ = judge(model, args, kwargs, record, ForeignPlan(rows=tuple(rows.items())), tp)
    return [*verdict.faults, *verdict.notes]


def _unknown(key: str, style: str) -> Finding:
    text = f"style {style!r} of row {key!r} is not known here, so nothing is said of it"
    return Finding(code="TP-STYLE", level="warning", where="", message=text)


def _pair(row: Row, claims: Claims) -> Pair:
    claim = claims.params[row.name]
    kind, note = _kind(row, claim)
    return Pair(
        name=row.name,
        shape=row.shape,
        bytes=row.bytes,
        ours=row.style,
        theirs=claim.style,
        kind=kind,
        note=note,
        theirs_cut=claim.dim is not None,
    )


def _kind(row: Row, claim: Claim) -> tuple[str, str]:
    if claim.style and claim.style not in KNOWN:
        return UNKNOWN, "no such style here"
    if row.is_cut != (claim.dim is not None):
        return (OURS, "") if row.is_cut else (THEIRS, row.reason)
    if not row.is_cut:
        return SAME, ""
    if row.dim != claim.dim:
        return OTHER, f"dim {row.dim} here, dim {claim.dim} there"
    closed = (row.style in _CLOSED, claim.style in _CLOSED)
    if closed[0] != closed[1] and not {row.style, claim.style} & _BETWEEN and len(row.shape) > 1:
        return GATHERED, "by theirs" if closed[1] else "by ours"
    if not all(closed) and row.style.startswith("packed_") != (claim.parts > 1) and len(row.shape) > 1:
        return OTHER, "in several pieces here, in one there" if claim.parts == 1 else "in one piece here"
    return SAME, ""
