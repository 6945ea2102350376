"""`render_explanation`: the findings as one page that needs nothing else, and as lines for a terminal."""

from __future__ import annotations

from isophase.audit.report import MISSING, interval, number, page_templates
from isophase.lab.explain import figures
from isophase.lab.explain.schema import Explanation

MOST_KNOCKOUTS = 4
LONG_HEADLINE = 150


def render_json(found: Explanation) -> str:
    """Write `explain.json`: all fields in the order of the schema, two spaces of indent, one final newline."""
    return found.model_dump_json(indent=2) + "\n"


def render_explanation(found: Explanation) -> str:
    """Draw an explanation as one self-contained HTML page.

    Args:
        found: the findings.

    Returns:
        The page; equal findings give equal text. No script, no outside resource.
    """
    environment = page_templates("isophase.lab.explain")
    environment.filters.update(num=_number, ci=_interval, share=_share)
    selective = sorted((k for k in found.knockouts if k.selective), key=lambda k: not k.is_kv_head)
    shown = selective or [k for k in found.knockouts if k.is_kv_head]
    return environment.get_template("explain.html.j2").render(
        found=found,
        long_headline=len(found.summary[0]) > LONG_HEADLINE,
        baseline=figures.baseline_figure(found),
        knockouts=[figures.knockout_figure(found, unit) for unit in shown[:MOST_KNOCKOUTS]],
        profiles=figures.profile_figures(found.gates),
        training=figures.training_figure(found.training),
        cycling=[
            (
                part,
                [figures.shift_figure(found, part, shift) for shift in part.shifts],
                figures.part_figures(part, found.boundary_phases),
            )
            for part in found.cycling
        ],
    )


def _number(value: float | None, digits: int = 2) -> str:
    return number(value, digits).replace("-", "\u2212")


def _interval(bounds: tuple[float, float] | None, digits: int = 2) -> str:
    return MISSING if bounds is None else interval(bounds, digits).replace("-", "\u2212").replace(" ", "\u00a0")


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f}".replace("-0", "0").replace("-", "\u2212")
