"""Sections of a verification report: the verdict first, then what differs, then the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.display.sections import Section, Table, count_text, findings_sections, share_text

if TYPE_CHECKING:
    from autotp.verification import Report

WORST = 10


def report_sections(report: Report) -> list[Section]:
    """Verdict, worst gradients, findings."""
    return [_head(report), *_gradients(report), *findings_sections(report.findings)]


def _head(report: Report) -> Section:
    verdict = "PASS" if report.ok else "FAIL"
    lines = [("first to differ", report.first_bad)] if report.first_bad else []
    tones = ["error"] * len(lines)
    lines += [
        ("outputs", f"largest error {report.forward_error:.1e} (limit {report.forward_limit:.1e})"),
        ("gradients", _gradient_text(report)),
        ("AdamW step", f"largest error {report.optimizer_error:.1e}" if report.gradients else "not compared"),
        ("state", "names, shapes and values are the unsharded ones" if report.state else "DIFFERS from the unsharded"),
        ("ranks", "agree" if report.ranks_agree else "DISAGREE on outputs or on what is not cut"),
        ("cut", f"{share_text(report.cut_share)} of the bytes of weight matrices"),
    ]
    return Section(
        title=f"Verify {report.model} on tp={report.tp} in {report.dtype}: {verdict}",
        lines=tuple(lines),
        tones=(*tones, *[""] * (len(lines) - len(tones))),
    )


def _gradient_text(report: Report) -> str:
    if not report.gradients:
        return "not compared"
    inputs = f" and {count_text(len(report.input_gradients), 'input')}" if report.input_gradients else ""
    compared = count_text(len(report.gradients), "parameter") + inputs
    return f"largest error {report.max_gradient_error:.1e} (limit {report.gradient_limit:.1e}), {compared}"


def _gradients(report: Report) -> list[Section]:
    errors = {**report.gradients, **{f"input {name}": error for name, error in report.input_gradients.items()}}
    worst = sorted(errors.items(), key=lambda pair: (-_ranked(pair[1]), pair[0]))[:WORST]
    if not worst:
        return []
    table = Table(
        headers=("gradient of", "error"),
        rows=tuple((name, f"{error:.1e}") for name, error in worst),
        right=frozenset({1}),
    )
    shown = f"the {WORST} largest of {len(errors):,}" if len(errors) > WORST else "all"
    return [Section(title=f"Gradient errors ({shown})", table=table, fold=report.ok)]


def _ranked(error: float) -> float:
    return float("inf") if error != error else error
