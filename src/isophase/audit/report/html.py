"""`render_html`: the report as one page that needs nothing else, the same bytes for the same findings.

No script, no outside resource; the page forbids both to the browser as well, so that a hostile name
in a report can do nothing. `seconds` is left out: it is the only field that differs between equal runs.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment

from isophase.audit.report import figures, grids, votes, words
from isophase.audit.report.figures import Figure
from isophase.audit.report.fold import control_for
from isophase.audit.report.pages import page_templates
from isophase.audit.schema import Finding, Report

LONG_HEADLINE = 150  # characters; beyond it smaller type keeps the verdict on a phone's first screen


def render_html(report: Report) -> str:
    """Draw the report as one self-contained HTML page.

    Args:
        report: the findings of a run.

    Returns:
        The page; equal findings give equal text.
    """
    targets = words.target_findings(report)
    return (
        _environment()
        .get_template("template.html.j2")
        .render(
            report=report,
            verdict=words.overall_verdict(report),
            headline=words.headline(report),
            long_headline=len(words.headline(report)) > LONG_HEADLINE,
            findings=words.all_findings(report),
            votes=votes.vote_figures(targets),
            sections=[_section(report, finding, index) for index, finding in enumerate(targets, start=1)],
        )
    )


def _environment() -> Environment:
    environment = page_templates()
    environment.filters.update(
        num=_typeset(words.number), ci=_typeset(words.interval), p=_typeset(words.p_value), count=words.count
    )
    environment.globals.update(words=words, phases_strip=figures.phases_strip)
    return environment


def _typeset(function: Any) -> Any:
    """Numbers with a true minus sign, and intervals that no line break parts."""

    def typeset(*arguments: Any) -> str:
        return str(function(*arguments)).replace("-", "\u2212").replace(" ", "\u00a0")

    return typeset


def _section(report: Report, finding: Finding, index: int) -> dict[str, Any]:
    """Everything that one finding shows."""
    control = words.control_of(report, finding)
    aligned = control_for(finding, control)
    small = [
        grids.heat_figure(finding),
        figures.scan_figure(finding),
        figures.log_probability_figure(finding, aligned),
        figures.trend_figure(finding),
        figures.boundary_figure(finding),
        grids.rankings_figure(finding),
    ]
    return {
        "id": f"finding-{index}",
        "finding": finding,
        "control": control,
        "control_phases": aligned,
        "hero": _heroes(finding, control, aligned),
        "strip": grids.strip_figure(finding),
        "small": [figure for figure in small if figure is not None],
    }


def _heroes(finding: Finding, control: Finding | None, aligned: Finding | None) -> list[Figure]:
    """Accuracy by phase; a control measured over another axis cannot share the picture."""
    heroes = [figures.phases_figure(finding, aligned)]
    if control is not None and aligned is None:
        own = figures.phases_figure(control, None)
        heroes.append(Figure(**{**own.__dict__, "key": "phases-control", "title": "The control model by phase"}))
    return heroes
