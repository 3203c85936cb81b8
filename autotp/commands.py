"""What the commands do, apart from options and exit codes: a request to a plan, an answer to JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotp import foreign
from autotp.errors import PlanError, RuleError, SpecError
from autotp.folding import fold_findings
from autotp.foreign import ForeignPlan
from autotp.lookup import find_row, nearest, neighbours
from autotp.plan_types import STYLES, Finding, Plan
from autotp.plans_io import row_dict

if TYPE_CHECKING:
    from autotp.display import Notes
    from autotp.models import LoadedModel
    from autotp.shipped import Comparison
    from autotp.verification import Report

WHOLE = "TP-WHOLE"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the options of `plan` and `explain` ask for, as typed."""

    model: str
    tp: int | None = None
    dp: int | None = None
    sequence_parallel: bool = False
    sample: str | None = None
    rules: Sequence[str] = ()
    plan_file: str | None = None


def make_plan(request: Request, notes: Notes) -> Plan:
    """Load the model and plan it; where a saved plan chose otherwise, its choices win, and what stays is told."""
    return _planned(request, notes)[0]


def compare_shipped(request: Request, notes: Notes) -> Comparison:
    """Plan the model, and compare with what transformers ships for it."""
    made, loaded = _planned(request, notes)
    with notes.working("comparing with the shipped plan"):
        from autotp.shipped import compare

        return compare(loaded.model, made, read_sample(request.sample) or loaded.sample)


def _planned(request: Request, notes: Notes) -> tuple[Plan, LoadedModel]:
    given = load_plan(request.plan_file)
    saved = given if isinstance(given, Plan) else None
    ranks = request.tp or (saved.tp if saved else None)
    if ranks is None:
        raise SpecError("Missing option --tp: over how many ranks to cut, as --tp 8", code="TP-USAGE")
    rules = read_rules(request.rules)
    with notes.working(f"planning {request.model}"):
        from autotp.models import load_spec
        from autotp.planning import plan

        loaded = load_spec(request.model)
        options: dict[str, Any] = {"mesh": f"tp={ranks},dp={request.dp}"} if request.dp else {"tp": ranks}
        options["sample"] = read_sample(request.sample) or loaded.sample
        options["sequence_parallel"] = request.sequence_parallel or (saved is not None and saved.sequence_parallel)
        if isinstance(given, ForeignPlan):
            options["plan"] = given
        made = plan(loaded.model, **options, rules=rules or None)
        if saved and (choices := _other_choices(saved, made, str(request.plan_file))):
            made = plan(loaded.model, **options, rules={**choices, **rules})
    made = replace(made, model=loaded.name)
    if saved and (changes := saved.diff(replace(made, model=saved.model))):
        notes.warning(f"this is not the plan of {request.plan_file}; there -> here:\n{changes}")
    return made, loaded


def _other_choices(saved: Plan, made: Plan, path: str) -> dict[str, str]:
    """Where a saved plan chose another style, as rules."""
    styles = {row.name: row.style for row in made.parameters}
    unknown = [row.name for row in saved.parameters if row.name not in styles]
    if unknown:
        raise PlanError(
            f"{path} is a plan for another model: {len(unknown)} of its {len(saved.parameters)} parameters "
            f"are not in this one, first {unknown[0]}"
        )
    chosen = {row.name: row.style for row in saved.parameters if not row.tied_to and styles[row.name] != row.style}
    by_tokens = {name for name, style in chosen.items() if style == "sequence_parallel"}
    return {
        name: style for name, style in chosen.items() if name not in by_tokens and styles[name] != "sequence_parallel"
    }


def load_plan(path: str | None) -> Plan | ForeignPlan | None:
    """The plan in a file, if one was named: ours, or (a .json of styles) one of transformers."""
    return foreign.load(path)


def read_rules(texts: Sequence[str]) -> dict[str, str]:
    """`GLOB=STYLE` texts as rules, style names checked; a later one for the same glob wins."""
    rules = {}
    for text in texts:
        glob, _, style = text.rpartition("=")
        if not glob:
            raise RuleError(f"--set {text!r}: write GLOB=STYLE, as --set 'layers.*.fc=replicate'")
        if style not in STYLES:
            known = ", ".join(nearest(style, list(STYLES)) or STYLES)
            raise RuleError(f"--set {text!r}: there is no style {style!r}. Did you mean: {known}")
        rules[glob] = style
    return rules


def read_sample(text: str | None) -> Any:
    """`--sample` as (args, kwargs), if it was given."""
    if text is None:
        return None
    from autotp.inputs import parse_sample

    return parse_sample(text)


def read_dtype(name: str) -> Any:
    """A floating point torch dtype by name."""
    import torch

    dtype = getattr(torch, name, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SpecError(f"--dtype {name!r}: no such floating point type. Use float64, float32 or bfloat16.")
    return dtype


def save_plan(made: Plan, path: str, words: Sequence[str]) -> None:
    """Write the plan, with the command that made it in its header."""
    command = shlex.join(["autotp", *(word for word in words if word not in ("--debug", "--json", "--wide"))])
    try:
        made.save(path, command=command)
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from error


def left_whole(made: Plan) -> list[Finding]:
    """Findings on weight matrices that could hold data and were left whole, folded."""
    whole = [finding for finding in made.findings if finding.code == WHOLE and finding.level != "note"]
    return [finding for finding, _ in fold_findings(whole)]


# Answers as one JSON document


def explained(made: Plan, parameter: str) -> dict[str, Any]:
    """What `autotp explain --json` prints."""
    row = find_row(made, parameter)
    return {
        "schema": 1,
        "model": made.model,
        "parameter": row_dict(row),
        "neighbours": [row_dict(other) for other in neighbours(made, row)],
    }


_TOLD = (
    "ok",
    "first_bad",
    "dtype",
    "forward_error",
    "forward_limit",
    "max_gradient_error",
    "gradient_limit",
    "optimizer_error",
    "state",
    "ranks_agree",
    "cut_share",
)


def verified(report: Report, model: str, ranks: int) -> dict[str, Any]:
    """What `autotp verify --json` prints."""
    return {
        "schema": 1,
        "model": model,
        "mesh": {"tp": ranks},
        **{name: getattr(report, name) for name in _TOLD},
        "gradients": dict(report.gradients),
        "input_gradients": dict(report.input_gradients),
        "findings": [vars(finding).copy() for finding in report.findings],
    }


def json_text(data: dict[str, Any]) -> str:
    """JSON, indented. NaN and infinity are no JSON: they become texts."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    if isinstance(data, float) and (data != data or abs(data) == float("inf")):
        return str(data)
    return data
