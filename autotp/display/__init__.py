"""Text, terminal and HTML views of plans and reports. The only package that imports rich.

Functions here return text or renderables; `show` and the `Notes` are what prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.display.comparison import comparison_sections
from autotp.display.html import html
from autotp.display.report import report_sections
from autotp.display.sections import plan_sections
from autotp.display.terminal import Notes, show, terminal_width
from autotp.display.text import boxed, plain
from autotp.plan_types import Plan

if TYPE_CHECKING:
    from autotp.verification import Report

__all__ = [
    "Notes",
    "comparison_sections",
    "plan_html",
    "plan_renderable",
    "plan_sections",
    "plan_text",
    "report_html",
    "report_renderable",
    "report_sections",
    "report_text",
    "show",
]


def plan_text(plan: Plan) -> str:
    """The plan as plain aligned text."""
    return plain(plan_sections(plan))


def plan_html(plan: Plan) -> str:
    """The plan for a notebook."""
    return html(plan_sections(plan))


def plan_renderable(plan: Plan) -> object:
    """The plan for `rich.print`."""
    return boxed(plan_sections(plan), terminal_width())


def report_text(report: Report) -> str:
    """The report as plain aligned text."""
    return plain(report_sections(report))


def report_html(report: Report) -> str:
    """The report for a notebook."""
    return html(report_sections(report))


def report_renderable(report: Report) -> object:
    """The report for `rich.print`."""
    return boxed(report_sections(report), terminal_width())
