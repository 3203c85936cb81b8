"""Sections of a comparison with the plan that transformers ships."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.display.sections import Section, Table, findings_sections, share_text
from autotp.lookup import shape_text

if TYPE_CHECKING:
    from autotp.shipped import Comparison

_TONES = {"same": "quiet", "ours only": "good", "gathered": ""}


def comparison_sections(comparison: Comparison) -> list[Section]:
    """Header, rows that differ first, counts, what is wrong with theirs."""
    return [_head(comparison), _rows(comparison), _totals(comparison), *findings_sections(comparison.findings)]


def _head(comparison: Comparison) -> Section:
    plan = comparison.plan
    lines = (("mesh", str(plan.mesh)), ("sample", plan.sample or "(none)"))
    return Section(title=f"Plan for {plan.model} beside the one that transformers ships", lines=lines)


def _rows(comparison: Comparison) -> Section:
    folded = comparison.folded()
    table = Table(
        headers=("parameter", "global", "ours", "theirs", "cut", "note"),
        rows=tuple(
            (name, shape_text(p.shape), p.ours, p.theirs or "(no row)", p.kind, p.note) for p, name, _ in folded
        ),
        tones=tuple(_TONES.get(pair.kind, "warning") for pair, _, _ in folded),
        toned=4,
        notes=5,
        droppable=(1,),
    )
    return Section(title=f"Parameters ({len(comparison.pairs):,})", table=table)


def _totals(comparison: Comparison) -> Section:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items() if count)
    ours, theirs = share_text(comparison.plan.cut_share), share_text(comparison.theirs_cut_share)
    lines = (("parameters", counts), ("cut", f"{ours} of the bytes of weight matrices by ours, {theirs} by theirs"))
    return Section(title="Totals", lines=lines)
