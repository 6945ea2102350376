"""The drawings of a needle report."""

from __future__ import annotations

from markupsafe import Markup

from isophase.audit.report import Plot, cell_path
from isophase.needle.summary import MethodResult, NeedleResult, Share

_CELL_PX = 26
_LEVELS = 5


def percent(share: Share) -> str:
    """Accuracy in points, or a dash."""
    return "–" if share.accuracy is None else f"{100 * share.accuracy:.0f}"


def bounds(share: Share) -> str:
    """Interval in points."""
    return f"{100 * share.lower:.0f} to {100 * share.upper:.0f}"


def heat_map(result: NeedleResult, method: MethodResult) -> Markup:
    """Accuracy of one method by length (rows) and depth (columns)."""
    lengths, depths = result.settings.lengths, result.settings.depths
    height = _CELL_PX * len(lengths)
    plot = Plot(
        f"{method.cache}: accuracy by length and depth", height_px=height + 24 + 40, top_px=24, bottom_px=40
    )  # fmt: skip
    cells: dict[str, list[tuple[int, int, int]]] = {}
    for row, shares in enumerate(method.cells):
        for column, share in enumerate(shares):
            kind = "null" if share.accuracy is None else f"h{min(_LEVELS - 1, int(share.accuracy * _LEVELS))}"
            cells.setdefault(kind, []).append((column, row, 1))
    plot.cells(24, height, depths, len(lengths), [(kind, cell_path(places)) for kind, places in sorted(cells.items())])
    for row, shares in enumerate(method.cells):
        y = 24 + _CELL_PX * (row + 0.5) + 4
        plot.text(0, y, f"{lengths[row]:,}", anchor="end", dx=-8)
        for column, share in enumerate(shares):
            plot.add(
                '<text class="row" x="{}%" y="{}" text-anchor="middle">{}<title>{}</title></text>',
                f"{100 * (column + 0.5) / depths:.2f}",
                f"{y:.0f}",
                percent(share),
                f"{lengths[row]:,} tokens, depth {column + 1} of {depths}: {percent(share)} "
                f"({bounds(share)}), {share.prompts} prompts",
            )
    plot.text(0, 13, "tokens", "axis", "start", dx=-38)
    plot.text(0, plot.base_px + 16, "start", anchor="start")
    plot.text(1, plot.base_px + 16, "end", anchor="end")
    plot.text(0.5, plot.base_px + 34, "depth of the needle", "axis")
    return plot.markup()


def phase_bars(method: MethodResult) -> Markup:
    """Accuracy of one method by phase, with intervals."""
    phases = len(method.by_phase)
    plot = Plot(f"{method.cache}: accuracy by phase", height_px=170)
    plot.value_axis([0, 0.25, 0.5, 0.75, 1.0], "accuracy", 2)
    known = [s.accuracy for s in method.by_phase if s.accuracy is not None]
    lowest = min(known, default=0.0)
    for phase, share in enumerate(method.by_phase):
        middle = (phase + 0.5) / phases
        plot.text(middle, plot.base_px + 16, str(phase))
        if share.accuracy is None:
            continue
        weak = " weak" if share.accuracy == lowest and lowest < max(known) else ""
        plot.rect(
            (phase + 0.2) / phases, (phase + 0.8) / phases, 0, share.accuracy, f"bar{weak}",
            f"phase {phase}: {percent(share)} ({bounds(share)}), {share.prompts} prompts",
        )  # fmt: skip
        plot.line(middle, middle, share.lower, share.upper, "whisker")
    plot.text(0.5, plot.base_px + 34, f"phase of the needle's first token, mod {phases}", "axis")
    return plot.markup()
