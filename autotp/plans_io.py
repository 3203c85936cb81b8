"""Plans as text: TOML files, plain dicts, differences.

A file holds choices and reasons, folded: `layers.{0..31}.mlp.up_proj.weight` is one table for 32
rows. Reading it back gives an equal `Plan`. Where folding would not keep the order of the rows,
they are written one by one, and the file says `folded = false` (or `folded_collectives = false`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotp.errors import PlanError
from autotp.folding import fold_names, fold_rows, module_order, unfold_name, unfold_row
from autotp.lookup import nearest, shape_text
from autotp.plan_types import STYLES, Collective, Finding, Memory, Plan, Row

SCHEMA = 1


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain data with one entry per parameter."""
    return {
        "schema": SCHEMA,
        "model": plan.model,
        "mesh": dict(plan.mesh),
        "sample": plan.sample,
        "sequence_parallel": plan.sequence_parallel,
        "parameters": [_row_dict(row) for row in plan.parameters],
        "collectives": [_call_dict(call) for call in plan.collectives],
        "memory": vars(plan.memory).copy(),
        "findings": [vars(finding).copy() for finding in plan.findings],
    }


def _row_dict(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "style": row.style,
        "shape": list(row.shape),
        "local_shape": list(row.local_shape),
        "dim": row.dim,
        "dtype": row.dtype,
        "tied_to": row.tied_to,
        "reason": row.reason,
    }


def _call_dict(call: Collective) -> dict[str, Any]:
    return {"module": call.module, "kind": call.kind, "pass": call.when, "bytes": call.bytes}


def from_dict(data: dict[str, Any], where: str = "plan") -> Plan:
    """The plan that `to_dict` gave; rows may be folded. Wrong or missing keys raise with their place."""
    if data.get("schema") != SCHEMA:
        raise PlanError(f"{where}: schema is {data.get('schema')!r}, this version reads {SCHEMA}")
    unfold, unfold_calls = data.get("folded", True), data.get("folded_collectives", True)
    try:
        return Plan(
            model=data["model"],
            mesh=data["mesh"],
            sample=data.get("sample", ""),
            sequence_parallel=data.get("sequence_parallel", False),
            parameters=tuple(_read_rows(data["parameters"], unfold, where)),
            collectives=tuple(_read_calls(data.get("collectives", []), unfold_calls)),
            memory=Memory(**data["memory"]),
            findings=tuple(Finding(**finding) for finding in data.get("findings", [])),
        )
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{where}: not a plan: {problem}") from error


def _read_rows(entries: Iterable[dict[str, Any]], unfold: bool, where: str) -> list[Row]:
    rows = []
    for entry in entries:
        row = Row(
            **{
                "dim": None,
                **entry,
                "shape": tuple(entry["shape"]),
                "local_shape": tuple(entry["local_shape"]),
            }
        )
        if row.style not in STYLES:
            hint = ", ".join(nearest(row.style, list(STYLES)) or STYLES)
            raise PlanError(f"{where}: {row.name}: unknown style {row.style!r}. Did you mean: {hint}")
        rows += unfold_row(row) if unfold else [row]
    if not unfold:
        return rows
    return [rows[i] for i in module_order(row.name for row in rows)]


def _read_calls(entries: Iterable[dict[str, Any]], unfold: bool) -> list[Collective]:
    calls = []
    for entry in entries:
        call = Collective(module=entry["module"], kind=entry["kind"], when=entry["pass"], bytes=entry["bytes"])
        times = entry.get("times", 1)
        names = unfold_name(call.module) if unfold else [call.module]
        calls += [replace(call, module=name) for name in names for _ in range(times)]
    if not unfold:
        return calls
    return [calls[i] for i in module_order(call.module for call in calls)]


# Files


def save(plan: Plan, path: str | Path, *, command: str | None = None) -> None:
    """Write a plan as TOML."""
    Path(path).write_text(dumps(plan, command=command), encoding="utf-8")


def load(path: str | Path) -> Plan:
    """Read a plan from TOML."""
    try:
        return loads(Path(path).read_text(encoding="utf-8"), where=str(path))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not a text file: {error}") from error


def loads(text: str, where: str = "plan") -> Plan:
    """Read a plan from TOML text."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{where}: not TOML: {error}") from error
    return from_dict(data, where)


def dumps(plan: Plan, *, command: str | None = None) -> str:
    """TOML text of a plan; `command` is the command that made it."""
    for folded, folded_calls in ((True, True), (True, False), (False, True)):
        text = _document(plan, command, folded, folded_calls)
        if loads(text) == plan:
            return text
    return _document(plan, command, folded=False, folded_calls=False)


def _document(plan: Plan, command: str | None, folded: bool, folded_calls: bool) -> str:
    rows = [row for row, _ in fold_rows(plan.parameters)] if folded else plan.parameters
    unfolded = [*([] if folded else ["folded = false"]), *([] if folded_calls else ["folded_collectives = false"])]
    head = {"model": plan.model, "sample": plan.sample, "sequence_parallel": plan.sequence_parallel}
    lines = [f"# {line}" for line in (command or "").splitlines()]
    lines += ["# Names fold repeated layers: {0..31}. Shapes: global, and what rank 0 holds.", ""]
    lines += [f"schema = {SCHEMA}", *unfolded, *_pairs(head)]
    lines += ["", "[mesh]", *_pairs(dict(plan.mesh)), "", "[memory]", *_pairs(vars(plan.memory))]
    for row in rows:
        lines += ["", "[[parameters]]", *_pairs(_row_dict(row))]
    for call in _call_entries(plan.collectives, folded_calls):
        lines += ["", "[[collectives]]", *_pairs(call)]
    for finding in plan.findings:
        lines += ["", "[[findings]]", *_pairs(vars(finding))]
    return "\n".join(lines) + "\n"


def _call_entries(calls: Sequence[Collective], folded: bool) -> list[dict[str, Any]]:
    if not folded:
        return [_call_dict(call) for call in calls]
    keys = [(call.kind, call.when, call.bytes) for call in calls]
    folds = fold_names([(call.module, key) for call, key in zip(calls, keys, strict=True)])
    return [{**_call_dict(calls[fold.members[0]]), "module": fold.pattern} for fold in folds]


def _pairs(data: dict[str, Any]) -> list[str]:
    """`key = value` lines; JSON's strings, numbers, booleans and flat lists are TOML's too. None is left out."""
    return [f"{_key(key)} = {_value(value)}" for key, value in data.items() if value is not None]


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _value(key)


def _value(value: Any) -> str:
    return json.dumps(value).replace("\x7f", "\\u007f")


# Differences


def diff(plan: Plan, other: Plan) -> str:
    """One line per folded difference, `here -> there`."""
    lines = [
        f"{label}: {here} -> {there}"
        for label, here, there in (
            ("model", plan.model, other.model),
            ("mesh", plan.mesh, other.mesh),
            ("sequence_parallel", plan.sequence_parallel, other.sequence_parallel),
        )
        if here != there
    ]
    mine, theirs = ({row.name: row for row in p.parameters} for p in (plan, other))
    changes = [
        (name, (_told(mine.get(name)), _told(theirs.get(name))))
        for name in dict.fromkeys([*mine, *theirs])
        if _told(mine.get(name)) != _told(theirs.get(name))
    ]
    for fold in fold_names(changes):
        here, there = changes[fold.members[0]][1]
        lines.append(f"{fold.pattern}: {here} -> {there}")
    return "\n".join(lines + _totals_diff(plan, other))


def _told(row: Row | None) -> str:
    if row is None:
        return "(no such parameter)"
    dim = "" if row.dim is None else f" dim {row.dim}"
    return f"{row.style}{dim} {shape_text(row.shape)} as {shape_text(row.local_shape)}"


def _totals_diff(plan: Plan, other: Plan) -> list[str]:
    totals = [
        ("bytes per rank", plan.memory.local_parameters, other.memory.local_parameters),
        ("collectives", len(plan.collectives), len(other.collectives)),
        ("bytes sent", sum(c.bytes for c in plan.collectives), sum(c.bytes for c in other.collectives)),
    ]
    return [f"{label}: {here:,} -> {there:,}" for label, here, there in totals if here != there]
