"""Reports for people and for scripts, each a pure function of a `Report`."""

from __future__ import annotations

from pathlib import Path

from isophase.atomic import write_atomically
from isophase.audit.report.figures import DIAMOND, MOST_BARS, TRIANGLE, Figure, bar_place, tick_step
from isophase.audit.report.html import render_html
from isophase.audit.report.pages import page_templates
from isophase.audit.report.svg import Plot, cell_path, nice_ticks
from isophase.audit.report.terminal import print_report
from isophase.audit.report.words import MISSING, interval, number, overall_verdict, phase_list
from isophase.audit.schema import Report

__all__ = [
    "DIAMOND",
    "MISSING",
    "MOST_BARS",
    "TRIANGLE",
    "Figure",
    "Plot",
    "bar_place",
    "cell_path",
    "interval",
    "nice_ticks",
    "number",
    "overall_verdict",
    "page_templates",
    "phase_list",
    "print_report",
    "render_html",
    "render_json",
    "tick_step",
    "write_report",
]


def render_json(report: Report) -> str:
    """Write `report.json`: all fields in the order of the schema, two spaces of indent, one final newline."""
    return report.model_dump_json(indent=2) + "\n"


def write_report(report: Report, folder: Path) -> Path:
    """Write `report.json` and `report.html`, each whole or not at all.

    Args:
        report: the findings of a run.
        folder: existing folder, such as the run's own.

    Returns:
        The page.
    """
    page = render_html(report)  # drawn before anything is written, so that a fault leaves both files as they were
    write_atomically(folder / "report.json", render_json(report))
    write_atomically(folder / "report.html", page)
    return folder / "report.html"
