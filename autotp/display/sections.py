"""What is shown of a plan or a report, before anything is laid out.

    Section   a title, lines of text, and perhaps a table
    Table     headers and rows of text; knows which column is the name, which may go first when space is short

Text, terminal and HTML views are made from the same sections, so they say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotp.folding import fold_collectives, fold_findings, fold_rows
from autotp.lookup import shape_text
from autotp.plan_types import Finding, Plan, Row

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text. `notes` is the column of long texts; `droppable` columns go when the terminal is narrow."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    tones: tuple[str, ...] = ()
    toned: int | None = None
    notes: int | None = None
    right: frozenset[int] = frozenset()
    droppable: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled block. A tone is good, quiet, warning, error or empty; `fold` hides the block behind a click in HTML.

    Lines with a label align their texts.
    """

    title: str = ""
    lines: tuple[tuple[str, str], ...] = ()
    tones: tuple[str, ...] = ()
    table: Table | None = None
    fold: bool = False


def size_text(count: int) -> str:
    """Bytes with a unit: `512 B`, `1.50 KiB`, `14.9 GiB`."""
    value = float(count)
    for unit in UNITS:
        if abs(value) < 1024 or unit == UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{count} B"
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def count_text(count: int, noun: str) -> str:
    """`1 call`, `2,000 calls`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def share_text(part: float) -> str:
    """A share in percent; never rounded up to 100 % or down to 0 %."""
    percent = 100 * part
    if 0 < percent < 0.1:
        return "<0.1 %"
    if 99.9 < percent < 100:
        return ">99.9 %"
    return f"{percent:.1f} %"


def plan_sections(plan: Plan) -> list[Section]:
    """Header, parameters, collectives, totals, findings."""
    return [_head(plan), _parameters(plan), _collectives(plan), _totals(plan), *findings_sections(plan.findings)]


def _head(plan: Plan) -> Section:
    sequence = ", sequence parallel" if plan.sequence_parallel else ""
    return Section(
        title=f"Plan for {plan.model}",
        lines=(("mesh", f"{plan.mesh}{sequence}"), ("sample", plan.sample or "(none)")),
    )


def _parameters(plan: Plan) -> Section:
    folded = fold_rows(plan.parameters)
    rows = tuple(
        (row.name, row.style, shape_text(row.shape), shape_text(row.local_shape), _reason(row)) for row, _ in folded
    )
    table = Table(
        headers=("parameter", "style", "global", "rank 0", "why"),
        rows=rows,
        tones=tuple("good" if row.is_cut else "quiet" for row, _ in folded),
        toned=1,
        notes=4,
        droppable=(2,),
    )
    return Section(title=f"Parameters ({len(plan.parameters):,})", table=table)


def _reason(row: Row) -> str:
    return f"tied to {row.tied_to}; {row.reason}" if row.tied_to else row.reason


def _collectives(plan: Plan) -> Section:
    folded = fold_collectives(plan.collectives)
    if not folded:
        return Section(title="Collectives (0)", lines=(("", "none"),))
    table = Table(
        headers=("module", "kind", "pass", "calls", "bytes each"),
        rows=tuple(
            (call.module or "(model)", call.kind, call.when, f"{count:,}", f"{call.bytes:,}") for call, count in folded
        ),
        right=frozenset({3, 4}),
        droppable=(3,),
    )
    return Section(title=f"Collectives ({len(plan.collectives):,}), on the sample", table=table, fold=True)


def _totals(plan: Plan) -> Section:
    memory = plan.memory
    share = memory.local_parameters / memory.parameters if memory.parameters else 0.0
    training = memory.local_parameters + memory.gradients + memory.optimizer
    sent = {when: [call.bytes for call in plan.collectives if call.when == when] for when in ("forward", "backward")}
    lines = (
        (
            "parameters",
            f"{size_text(memory.parameters)} in all, {size_text(memory.local_parameters)} on rank 0 "
            f"({share_text(share)})",
        ),
        ("cut", f"{share_text(plan.cut_share)} of the bytes of weight matrices"),
        ("traffic", "; ".join(f"{when} {count_text(len(b), 'call')}, {size_text(sum(b))}" for when, b in sent.items())),
        (
            "training",
            f"{size_text(training)} on rank 0 (estimate): parameters {size_text(memory.local_parameters)}, "
            f"gradients {size_text(memory.gradients)}, AdamW {size_text(memory.optimizer)}",
        ),
        ("", "not counted: activations, buffers, temporary memory, the effect of other mesh axes"),
    )
    return Section(title="Totals", lines=lines)


def findings_sections(findings: Sequence[Finding]) -> list[Section]:
    """Findings, errors and warnings first; no section if there are none."""
    folded = fold_findings(findings)
    if not folded:
        return []
    lines = tuple(("", str(finding) + (f" [{count} times]" if count > 1 else "")) for finding, count in folded)
    return [Section(title=f"Findings ({len(findings):,})", lines=lines, tones=tuple(f.level for f, _ in folded))]
