"""Charts made of many small cells: item by residue, and the completion probe's flip strip."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isophase.audit.report import words
from isophase.audit.report.figures import MOST_BARS, TRIANGLE, Figure, bar_place, tick_step
from isophase.audit.report.svg import Plot, cell_path
from isophase.audit.schema import CompletionStrip, Finding

MOST_ROWS = 200
HEAT_PX = 200
LEVELS = 5
EDGE_RATIOS = (2.0, 10.0)  # the strip tells apart: below twice, below ten times, above


def heat_figure(finding: Finding) -> Figure | None:
    """Mean outcome of every item at every residue, items with the fewest hits on top."""
    if not finding.heat_map:
        return None
    total = finding.axis_tokens
    items = [[words.finite(value) for value in row] for row in finding.heat_map]
    rows = _pooled(sorted(items, key=_row_mean), MOST_ROWS)
    row_px = min(14.0, max(HEAT_PX / len(rows), 1.0))
    height = round(row_px * len(rows))
    plot = Plot(
        f"Outcome of {len(items)} items at {total} residues; columns of misses are weak phases.",
        height_px=height + 24 + 48,
        bottom_px=48,
    )
    plot.cells(plot.top_px, height, total, len(rows), _heat_layers(rows))
    if total <= MOST_BARS:
        for edge in range(1, total):
            plot.line(edge / total, edge / total, 0, 1, "gap")
    plot.text(0, plot.top_px - 11, f"{len(items)} items, hardest on top", "axis", "start")
    for phase in range(0, total, tick_step(total)):
        plot.text((phase + 0.5) / total, plot.base_px + 16, str(phase))
    for phase in finding.boundary_phases:
        if 0 <= phase < total:
            plot.mark((phase + 0.5) / total, plot.base_px + 21, TRIANGLE, "edge")
    plot.text(0.5, plot.base_px + 42, f"residue, mod {total}", "axis")
    legend = [("h0", "missed"), ("h2", "half"), ("h4", "right")]
    if any(value is None for row in rows for value in row):
        legend.append(("null", "no data"))
    pooled = f" Here {len(items)} items share {len(rows)} rows." if len(rows) < len(items) else ""
    return Figure(
        key="heat",
        title="Items by residue",
        svg=plot.markup(),
        legend=tuple(legend),
        reading=(
            "Every row is one set of records and one question; every column is a residue at which the "
            "queried record began. A phase effect is an upright stripe: most items miss at the same "
            "residue. A hard item is a level stripe; it says nothing about phases." + pooled
        ),
    )


def _row_mean(row: Sequence[float | None]) -> float:
    """Mean of what is known; rows without data go last."""
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known else math.inf


def _pooled(rows: list[list[float | None]], most: int) -> list[list[float | None]]:
    """Average neighbouring rows until at most `most` remain."""
    if len(rows) <= most:
        return rows
    pooled = []
    for index in range(most):
        group = rows[index * len(rows) // most : (index + 1) * len(rows) // most]
        columns = max(len(row) for row in group)
        means = (_row_mean([row[c] for row in group if c < len(row)]) for c in range(columns))
        pooled.append([None if math.isinf(mean) else mean for mean in means])
    return pooled


def _heat_layers(rows: list[list[float | None]]) -> list[tuple[str, str]]:
    """Cells by level, with runs of equal neighbours merged: 200 x 128 cells must stay small."""
    layers: dict[str, list[tuple[int, int, int]]] = {}
    strokes: list[str] = []
    for y, row in enumerate(rows):
        start = 0
        kinds = [_heat_kind(value) for value in row]
        for x, kind in enumerate(kinds):
            if kind == "null":
                strokes.append(f"M{x} {y + 1}l1-1")
            if x + 1 == len(kinds) or kinds[x + 1] != kind:
                layers.setdefault(kind, []).append((start, y, x + 1 - start))
                start = x + 1
    drawn = [(kind, cell_path(cells)) for kind, cells in sorted(layers.items())]
    return [*drawn, ("hatch", "".join(strokes))] if strokes else drawn


def _heat_kind(value: float | None) -> str:
    return "null" if value is None else f"h{round(min(max(value, 0.0), 1.0) * (LEVELS - 1))}"


def strip_figure(finding: Finding) -> Figure | None:
    """Which number wins, by family of prompts and length of the filler."""
    strip = finding.completion
    if strip is None or not strip.families or not strip.filler_tokens:
        return None
    columns, row_px = len(strip.filler_tokens), 44
    plot = Plot(
        f"The right number 8 wins {strip.rankings_right} of {strip.rankings} rankings, by family and filler length.",
        height_px=row_px * len(strip.families) + 48,
        top_px=0,
        bottom_px=48,
    )
    for row, family in enumerate(strip.families):
        top = row * row_px
        name = words.plain(family)
        plot.text(0, top + 12, name if len(name) <= 44 else name[:43] + "\u2026", "row", "start")
        plot.cells(top + 18, row_px - 22, columns, 2, _strip_layers(strip, row))
        middle = top + 18 + (row_px - 22) / 2
        plot.add('<line class="base" x1="0" x2="100%" y1="{}" y2="{}"/>', middle, middle)
    for column in range(0, columns, tick_step(columns)):
        plot.text((column + 0.5) / columns, plot.base_px + 16, str(strip.filler_tokens[column]))
    plot.text(0.5, plot.base_px + 38, "filler, tokens", "axis")
    return Figure(
        key="completion",
        title="Which number wins as the filler grows",
        svg=plot.markup(),
        legend=(
            ("f5", "8 wins (upper half), over 10 times likelier"),
            ("f4", "2 to 10 times"),
            ("f3", "below twice"),
            ("f0", "32 wins (lower half), over 10 times likelier"),
            ("f1", "2 to 10 times"),
            ("f2", "below twice"),
        ),
        reading=(
            "Each strip is one family of prompts; each step to the right adds one token of filler that "
            "should not matter. A block above the line means that the model prefers the right number, 8; "
            "below it, the wrong number, 32. Deeper colour means a clearer preference. A preference that "
            f"flips up and down in a fixed rhythm follows the phase. 8 won {strip.rankings_right:,} of "
            f"{strip.rankings:,} rankings."
        ),
    )


def _strip_layers(strip: CompletionStrip, row: int) -> list[tuple[str, str]]:
    layers: dict[str, list[tuple[int, int, int]]] = {}
    for column, (right, wrong) in enumerate(zip(strip.p_right[row], strip.p_wrong[row], strict=True)):
        right, wrong = words.finite(right), words.finite(wrong)
        if right is None or wrong is None:
            continue
        wins = right > wrong
        more, less = max(right, wrong), min(right, wrong)
        clear = sum(more > ratio * less for ratio in EDGE_RATIOS)
        kind = f"f{3 + clear if wins else 2 - clear}"
        layers.setdefault(kind, []).append((column, 0 if wins else 1, 1))
    return [(kind, cell_path(cells)) for kind, cells in sorted(layers.items())]


def rankings_figure(finding: Finding) -> Figure | None:
    """Share of rankings that the right number wins, by phase of the filler's length."""
    strip = finding.completion
    if strip is None or not strip.right_wins_by_phase:
        return None
    shares = strip.right_wins_by_phase
    total = len(shares)
    plot = Plot(
        "Share of rankings won by 8, by filler length mod " + f"{total}: " + ", ".join(map(words.number, shares[:16])),
        height_px=240,
        bottom_px=48,
    )
    plot.value_axis([0, 0.25, 0.5, 0.75, 1], "share won by 8", 2)
    for phase, share in enumerate(shares):
        known = words.finite(share)
        if known is not None:
            weak = " weak" if known < 0.5 else ""
            plot.rect(*bar_place(phase, total), 0, known, "bar" + weak, f"phase {phase}: {words.number(known)}")
    for phase in range(0, total, tick_step(total)):
        plot.text((phase + 0.5) / total, plot.base_px + 16, str(phase))
    plot.text(0.5, plot.base_px + 38, f"filler length, mod {total}", "axis")
    return Figure(
        key="rankings",
        title="Wins by phase of the filler",
        svg=plot.markup(),
        legend=(("bar", "8 wins at least half"), ("bar weak", "32 wins more often")),
        reading=(
            "The strips above, folded: all filler lengths with the same phase are pooled. Level bars mean "
            "that the phase does not matter; a low bar is a phase at which the wrong number tends to win."
        ),
    )
