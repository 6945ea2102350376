"""A small drawing board for charts that stretch with the page while their text keeps its size.

Horizontal places are fractions of the plot's width and become percentages; vertical places are
pixels. So one drawing serves a phone and a desk, and no text shrinks or stretches. Percentages are
not allowed in paths, therefore curves and cells sit in a nested `<svg>` with its own stretched
coordinates. Colours come from the page's style sheet by class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

UNITS = 1000  # width of the nested coordinates


def _short(value: float) -> str:
    """Two digits are finer than any screen; fewer characters keep large drawings small."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _percent(fraction: float) -> str:
    return _short(100 * fraction) + "%"


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Choose round tick values that cover the range.

    Args:
        low: smallest value to cover.
        high: largest value to cover; at or below `low` the range is widened.
        wanted: about how many steps.

    Returns:
        Ascending values with equal steps of 1, 2 or 5 times a power of ten.
    """
    span = high - low
    if span <= 0:
        low, span = low - 0.5, 1.0
        high = low + span
    raw = span / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


class Plot:
    """One drawing with a value axis on the left.

    Args:
        label: what the drawing shows and says, for readers who do not see it.
        height_px: height of the whole drawing.
        low: value at the bottom of the plot area.
        high: value at its top; must exceed `low`.
        top_px: room above the plot area.
        bottom_px: room below it.
    """

    def __init__(
        self,
        label: str,
        *,
        height_px: int,
        low: float = 0.0,
        high: float = 1.0,
        top_px: int = 24,
        bottom_px: int = 40,
    ) -> None:
        self.label = label
        self.height_px = height_px
        self.low, self.high = low, high
        self.top_px, self.base_px = top_px, height_px - bottom_px
        self._parts: list[Markup] = []

    def y(self, value: float) -> float:
        """Pixels from the top for a value; values beyond the axis are kept at its end."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.base_px - share * (self.base_px - self.top_px)

    def add(self, template: str, *values: object) -> None:
        """Add markup; the values are escaped."""
        self._parts.append(Markup(template).format(*values))

    def rect(self, x0: float, x1: float, low: float, high: float, kind: str, title: str = "") -> None:
        """Draw a bar between two values; too low a bar still shows as a line."""
        top, bottom = self.y(high), self.y(low)
        height = max(bottom - top, 1.0)
        self.add(
            '<rect class="{}" x="{}" y="{}" width="{}" height="{}">{}</rect>',
            kind,
            _percent(x0),
            _short(bottom - height),
            _percent(x1 - x0),
            _short(height),
            _title(title),
        )

    def line(self, x0: float, x1: float, value0: float, value1: float, kind: str) -> None:
        """Draw a straight line between two points."""
        self.add(
            '<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>',
            kind,
            _percent(x0),
            _percent(x1),
            _short(self.y(value0)),
            _short(self.y(value1)),
        )

    def dot(self, x: float, value: float, radius_px: float, kind: str, title: str = "") -> None:
        """Draw a round mark."""
        self.add(
            '<circle class="{}" cx="{}" cy="{}" r="{}">{}</circle>',
            kind,
            _percent(x),
            _short(self.y(value)),
            _short(radius_px),
            _title(title),
        )

    def text(self, x: float, y_px: float, words: str, kind: str = "tick", anchor: str = "middle", dx: int = 0) -> None:
        """Write text at a fraction of the width and a pixel height."""
        self.add(
            '<text class="{}" x="{}" y="{}" dx="{}" text-anchor="{}">{}</text>',
            kind,
            _percent(x),
            _short(y_px),
            dx,
            anchor,
            words,
        )

    def mark(self, x: float, y_px: float, path: str, kind: str) -> None:
        """Draw a small shape whose path is in pixels around the point."""
        self.add(
            '<svg class="free" x="{}" y="{}"><path class="{}" d="{}"/></svg>',
            _percent(x),
            _short(y_px),
            kind,
            path,
        )

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points (fraction, value); what leaves the plot area is cut off.

        Values are not clamped here: a clamped curve would show a flat top that the fit lacks.
        """
        if len(points) < 2:
            return
        scale = (self.base_px - self.top_px) / (self.high - self.low)
        path = "L".join(f"{_short(x * UNITS)} {_short((self.high - value) * scale)}" for x, value in points)
        height = self.base_px - self.top_px
        self.add(
            '<svg y="{}" width="100%" height="{}" viewBox="0 0 {} {}" preserveAspectRatio="none">'
            '<path class="{}" d="M{}"/></svg>',
            self.top_px,
            height,
            UNITS,
            height,
            kind,
            path,
        )

    def cells(
        self, top_px: float, height_px: float, columns: int, rows: int, layers: Iterable[tuple[str, str]]
    ) -> None:
        """Draw a grid of cells, one path per class, from `cell_path`."""
        self.add(
            '<svg class="cells" y="{}" width="100%" height="{}" viewBox="0 0 {} {}" preserveAspectRatio="none">',
            _short(top_px),
            _short(height_px),
            columns,
            rows,
        )
        for kind, path in layers:
            self.add('<path class="{}" d="{}"/>', kind, path)
        self._parts.append(Markup("</svg>"))

    def value_axis(self, ticks: Sequence[float], name: str, digits: int) -> None:
        """Draw horizontal grid lines with their values, and the axis name above."""
        for value in ticks:
            self.line(0, 1, value, value, "base" if value == ticks[0] else "grid")
            self.text(0, self.y(value) + 4, f"{value:.{digits}f}".replace("-", "\u2212"), anchor="end", dx=-8)
        self.text(0, self.top_px - 11, name, "axis", "start", dx=-38)

    def markup(self) -> Markup:
        """The finished drawing."""
        head = Markup('<svg class="plot" role="img" aria-label="{}" height="{}">').format(self.label, self.height_px)
        return head + Markup("").join(self._parts) + Markup("</svg>")


def cell_path(cells: Iterable[tuple[int, int, int]]) -> str:
    """Write cells (column, row, width) as one path; runs of equal cells should come merged."""
    return "".join(f"M{column} {row}h{width}v1h-{width}z" for column, row, width in cells)


def _title(words: str) -> Markup:
    """A tooltip, where there is something to say."""
    return Markup("<title>{}</title>").format(words) if words else Markup("")
