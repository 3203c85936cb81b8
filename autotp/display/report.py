"""Sections of a verification report: the verdict first, then what differs, then the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from autotp.display.sections import Section, Table, findings_sections, share_text
from autotp.plan_types import Finding

WORST = 10


class ReportLike(Protocol):
    """What this file reads of a `Report`."""

    @property
    def ok(self) -> bool:
        """Whether everything agreed."""

    @property
    def forward_error(self) -> float:
        """Largest relative error of any output."""

    @property
    def gradients(self) -> Mapping[str, float]:
        """Largest relative error of each parameter's gradient."""

    @property
    def max_gradient_error(self) -> float:
        """The largest of `gradients`."""

    @property
    def first_bad(self) -> str | None:
        """The first module that differs, and in what."""

    @property
    def cut_share(self) -> float:
        """Share of the bytes of weight matrices that was cut."""

    @property
    def findings(self) -> Sequence[Finding]:
        """Anything else worth knowing."""


def report_sections(report: ReportLike) -> list[Section]:
    """Verdict, worst gradients, findings."""
    verdict = "PASS" if report.ok else "FAIL"
    subject = " ".join(str(part) for part in (getattr(report, "model", ""), _mesh(report)) if part)
    pairs = [
        ("outputs", f"largest error {report.forward_error:.2e}"),
        ("gradients", f"largest error {report.max_gradient_error:.2e} over {len(report.gradients):,} parameters")
        if report.gradients
        else ("gradients", "not compared"),
        ("cut", f"{share_text(report.cut_share)} of the bytes of weight matrices"),
    ]
    if report.first_bad:
        pairs.insert(0, ("first to differ", report.first_bad))
    head = Section(
        title=f"Verify {subject}: {verdict}" if subject else f"Verify: {verdict}",
        lines=tuple(pairs),
        tones=("error" if report.first_bad else "", *("" for _ in pairs[1:])),
    )
    return [head, *_gradients(report), *findings_sections(report.findings)]


def _mesh(report: ReportLike) -> str:
    mesh = getattr(report, "mesh", None)
    if mesh:
        return "on " + ", ".join(f"{axis}={size}" for axis, size in dict(mesh).items())
    tp = getattr(report, "tp", None)
    return f"on tp={tp}" if tp else ""


def _gradients(report: ReportLike) -> list[Section]:
    worst = sorted(report.gradients.items(), key=lambda pair: (-_ranked(pair[1]), pair[0]))[:WORST]
    if not worst:
        return []
    table = Table(
        headers=("gradient of", "error"),
        rows=tuple((name, f"{error:.2e}") for name, error in worst),
        right=frozenset({1}),
    )
    shown = f"the {len(worst)} largest of {len(report.gradients):,}" if len(report.gradients) > WORST else "all"
    return [Section(title=f"Gradient errors ({shown})", table=table, fold=report.ok)]


def _ranked(error: float) -> float:
    return float("inf") if error != error else error
