"""The report of a needle run: JSON, one self-contained page, and a table for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from isophase.atomic import write_atomically
from isophase.audit import write_error
from isophase.audit.report import page_templates
from isophase.needle.figures import bounds, heat_map, percent, phase_bars
from isophase.needle.summary import NeedleResult

_LENGTHS_ABREAST = 8
"""Columns of a terminal's table by length, of seven digits each."""


def render_json(result: NeedleResult) -> str:
    """The result as JSON: two spaces of indent, one final newline."""
    return result.model_dump_json(indent=2) + "\n"


def render_html(result: NeedleResult) -> str:
    """The result as one page without scripts or outside resources; equal results give equal bytes."""
    environment = page_templates("isophase.needle")
    return environment.get_template("needle.html.j2").render(
        result=result, percent=percent, bounds=bounds, heat_map=heat_map, phase_bars=phase_bars
    )


def write_report(result: NeedleResult, folder: Path) -> Path:
    """Write `needle.json` and `needle.html` into a run folder; returns the page.

    Raises:
        IsophaseError: if they cannot be written; the answers are kept.
    """
    try:
        write_atomically(folder / "needle.json", render_json(result))
        write_atomically(folder / "needle.html", render_html(result))
    except OSError as error:
        raise write_error(folder, error) from error
    return folder / "needle.html"


def results_table(result: NeedleResult) -> Group:
    """What the terminal shows, within 80 columns: methods by number, figures of each, then accuracy by length."""
    names, figures = _table("", "cache"), _table("cache", "entries", "KiB", "accuracy", "95 %", "gap", "phase")
    for number, method in enumerate(result.methods, start=1):
        names.add_row(str(number), Text(method.cache, overflow="fold"))
        figures.add_row(
            str(number),
            f"{method.entries:,}",
            f"{method.stored_bytes / 1024:,.0f}",
            percent(method.overall),
            bounds(method.overall),
            "–" if method.phases is None else f"{method.phases.gap_points:.0f}",
            "–" if method.phases is None else method.phases.verdict,
        )
    parts: list[RenderableType] = [names, "", figures]
    lengths = result.settings.lengths
    for first in range(0, len(lengths) if len(lengths) > 1 else 0, _LENGTHS_ABREAST):
        chosen = slice(first, first + _LENGTHS_ABREAST)
        by_length = _table("cache", *(f"{n:,}" for n in lengths[chosen]))
        for number, method in enumerate(result.methods, start=1):
            by_length.add_row(str(number), *(percent(share) for share in method.by_length[chosen]))
        parts += ["", "accuracy by length, in tokens", by_length]
    return Group(*parts, "")


def _table(first: str, *headings: str) -> Table:
    """A table without lines; text on the left, numbers on the right."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (first, *headings):
        out.add_column(heading, justify="left" if heading in ("cache", "") else "right")
    return out
