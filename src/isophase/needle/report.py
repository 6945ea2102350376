"""The report of a needle run: JSON, one self-contained page, and a table for the terminal."""

from __future__ import annotations

from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from isophase.atomic import write_atomically
from isophase.audit.report import words
from isophase.audit.store import write_error
from isophase.needle.figures import bounds, heat_map, percent, phase_bars
from isophase.needle.summary import NeedleResult


def render_json(result: NeedleResult) -> str:
    """The result as JSON: two spaces of indent, one final newline."""
    return result.model_dump_json(indent=2) + "\n"


def render_html(result: NeedleResult) -> str:
    """The result as one page without scripts or outside resources; equal results give equal bytes."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("isophase.needle", "."), PackageLoader("isophase.audit.report", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            words.plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
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


def table(result: NeedleResult) -> Table:
    """Methods, one a line: budget, bytes, accuracy overall and by length, gap over phases and verdict."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("cache", overflow="fold")
    for heading in ("entries", "KiB", "accuracy", "95 %", *(f"{n:,}" for n in result.settings.lengths), "gap", "phase"):
        out.add_column(heading, justify="right")
    for method in result.methods:
        gap = "–" if method.phases is None else f"{method.phases.gap_points:.0f}"
        out.add_row(
            method.cache,
            f"{method.entries:,}",
            f"{method.stored_bytes / 1024:,.0f}",
            percent(method.overall),
            bounds(method.overall),
            *(percent(share) for share in method.by_length),
            gap,
            "–" if method.phases is None else method.phases.verdict,
        )
    return out
