"""Plans as text: TOML files, plain dicts, differences.

A file holds choices and reasons, folded: `layers.{0..31}.mlp.up_proj.weight` is one table for 32
rows. Reading it back gives an equal `Plan`. A list whose order folding would lose is written item by
item, and the file says so: `unfolded = ["collectives"]`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotp.errors import PlanError
from autotp.folding import as_template, fold_names, in_order, module_order, named, unfold_name
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
        "parameters": [row_dict(row) for row in plan.parameters],
        "collectives": [_call_dict(call) for call in plan.collectives],
        "memory": vars(plan.memory).copy(),
        "findings": [vars(finding).copy() for finding in plan.findings],
    }


def row_dict(row: Row) -> dict[str, Any]:
    """One parameter as plain data."""
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
    unfolded = data.get("unfolded", [])
    _check_styles(data.get("parameters", []), where)
    try:
        return Plan(
            model=data["model"],
            mesh=data["mesh"],
            sample=data.get("sample", ""),
            sequence_parallel=data.get("sequence_parallel", False),
            parameters=_restored("parameters", map(_read_row, data.get("parameters", [])), unfolded),
            collectives=_restored("collectives", map(_read_call, data.get("collectives", [])), unfolded),
            memory=Memory(**data["memory"]),
            findings=_restored("findings", (Finding(**entry) for entry in data.get("findings", [])), unfolded),
        )
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{where}: not a plan: {problem}") from error


def _check_styles(entries: Iterable[dict[str, Any]], where: str) -> None:
    for entry in entries:
        style = entry.get("style")
        if style not in STYLES:
            hint = ", ".join(nearest(str(style), list(STYLES)) or STYLES)
            raise PlanError(f"{where}: {entry.get('name')}: unknown style {style!r}. Did you mean: {hint}")


def _read_row(entry: dict[str, Any]) -> Row:
    shapes = {"shape": tuple(entry["shape"]), "local_shape": tuple(entry["local_shape"])}
    return Row(**{"dim": None, **entry, **shapes})


def _read_call(entry: dict[str, Any]) -> Collective:
    return Collective(module=entry["module"], kind=entry["kind"], when=entry["pass"], bytes=entry["bytes"])


# Lists whose repeated layers are folded


def _folded(section: str, items: tuple[Any, ...]) -> list[Any] | None:
    """The items folded, or None if that would lose their order."""
    marked = [as_template(item) for item in items]
    folds = in_order(fold_names([(name, blank) for name, blank in marked]), [name for name, _ in marked])
    short = [named(marked[fold.members[0]][1], fold.pattern) for fold in folds]
    return short if _restored(section, short, ()) == items else None


def _restored(section: str, items: Iterable[Any], unfolded: Sequence[str]) -> tuple[Any, ...]:
    """All items that folded ones stand for, in module order; forward calls and backward calls apart."""
    if section in unfolded:
        return tuple(items)
    groups: dict[str, list[tuple[str, Any]]] = {}
    for item in items:
        pattern, blank = as_template(item)
        group = groups.setdefault(getattr(item, "when", ""), [])
        group += [(name, named(blank, name)) for name in unfold_name(pattern)]
    return tuple(group[i][1] for group in groups.values() for i in module_order(name for name, _ in group))


# Files


def save(plan: Plan, path: str | Path, *, command: str | None = None) -> None:
    """Write a plan as TOML."""
    Path(path).write_text(dumps(plan, command=command), encoding="utf-8")


def load(path: str | Path) -> Plan:
    """Read a plan from TOML, or from what `autotp plan --json` printed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return from_dict(json.loads(text), str(path)) if str(path).endswith(".json") else loads(text, where=str(path))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not a text file: {error}") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}: not JSON: {error}") from error


def loads(text: str, where: str = "plan") -> Plan:
    """Read a plan from TOML text."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{where}: not TOML: {error}") from error
    return from_dict(data, where)


def dumps(plan: Plan, *, command: str | None = None) -> str:
    """TOML text of a plan; `command` is the command that made it."""
    lists = {"parameters": plan.parameters, "collectives": plan.collectives, "findings": plan.findings}
    folded = {section: _folded(section, items) for section, items in lists.items()}
    unfolded = [section for section, short in folded.items() if short is None]
    head = {"model": plan.model, "sample": plan.sample, "sequence_parallel": plan.sequence_parallel}
    lines = [f"# {line}" for line in (command or "").splitlines()]
    lines += ["# Names fold repeated layers: {0..31}. Shapes: global, and what rank 0 holds.", ""]
    lines += [f"schema = {SCHEMA}", *_pairs({"unfolded": unfolded or None}), *_pairs(head)]
    lines += ["", "[mesh]", *_pairs(dict(plan.mesh)), "", "[memory]", *_pairs(vars(plan.memory))]
    for section, items in lists.items():
        for item in folded[section] or items:
            lines += ["", f"[[{section}]]", *_pairs(_as_dict(item))]
    return "\n".join(lines) + "\n"


def _as_dict(item: Any) -> dict[str, Any]:
    if isinstance(item, Row):
        return row_dict(item)
    return _call_dict(item) if isinstance(item, Collective) else vars(item).copy()


def _pairs(data: dict[str, Any]) -> list[str]:
    """`key = value` lines; JSON's strings, numbers, booleans and flat lists are TOML's too. None is left out."""
    return [f"{_key(key)} = {_value(value)}" for key, value in data.items() if value is not None]


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _value(key)


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


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
