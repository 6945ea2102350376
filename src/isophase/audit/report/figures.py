"""The charts of one finding. Each is a `Figure`: a drawing, its legend, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from isophase.audit.report import words
from isophase.audit.report.svg import Plot, nice_ticks
from isophase.audit.schema import Finding

MOST_BARS = 40  # with more phases than this, dots replace bars: a bar would be two pixels wide
TRIANGLE = "M-4 7L0 0L4 7z"
DIAMOND = "M0-4.5L4.5 0L0 4.5L-4.5 0z"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One drawing with its words.

    Attributes:
        key: name for style sheet and tests.
        title: heading.
        svg: the drawing.
        reading: how to read it, in plain words.
        legend: (class of the swatch, meaning).
    """

    key: str
    title: str
    svg: Markup
    reading: str
    legend: tuple[tuple[str, str], ...] = ()


def bar_place(index: int, total: int, fill: float = 0.58) -> tuple[float, float]:
    """Left and right edge of bar `index` of `total`, as fractions of the width."""
    return (index + 0.5 - fill / 2) / total, (index + 0.5 + fill / 2) / total


def tick_step(total: int) -> int:
    """Label every so-manyth column, in powers of two, so that labels fit a phone."""
    most = 16 if total <= 100 else 8
    step = 1
    while total / step > most:
        step *= 2
    return step


def phase_axis(plot: Plot, finding: Finding, name: str) -> None:
    """Label phases below the plot, and mark those at which the record straddles a chunk edge."""
    total = finding.axis_tokens
    step = tick_step(total)
    edges = {phase for phase in finding.boundary_phases if 0 <= phase < total}
    for phase in range(0, total, step):
        plot.text((phase + 0.5) / total, plot.base_px + 16, str(phase))
    for phase in sorted(edges):
        plot.mark((phase + 0.5) / total, plot.base_px + 21, TRIANGLE, "edge")
    plot.text(0.5, plot.base_px + 42, name, "axis")


def is_weak(finding: Finding, phase: int) -> bool:
    """Whether a phase is drawn in the colour of a loss."""
    return phase in finding.weak_phases or (finding.verdict == "sensitive" and phase == finding.worst_phase)


def phases_figure(finding: Finding, control: Finding | None) -> Figure:
    """Accuracy by phase with Wilson intervals, the fitted harmonic, and the control model."""
    total = finding.axis_tokens
    label = (
        f"Accuracy by phase, {total} phases: worst {words.phase_accuracy(finding, finding.worst_phase)}; "
        f"best {words.phase_accuracy(finding, finding.best_phase)}; mean {words.number(finding.accuracy)}."
    )
    plot = Plot(label, height_px=300, bottom_px=48)
    plot.value_axis([0, 0.25, 0.5, 0.75, 1], "accuracy", 2)
    for phase in range(total):
        _phase_mark(plot, finding, phase)
    if control is not None:
        for phase in range(total):
            _control_mark(plot, control, phase)
    if total > 1 and words.finite(finding.amplitude) is not None:
        plot.curve(_harmonic(finding), "fit")
    worst = words.at_phase(finding.accuracy_by_phase, finding.worst_phase)
    if finding.verdict == "sensitive" and worst is not None and finding.worst_phase is not None:
        high = finding.interval_by_phase[finding.worst_phase][1]
        plot.text((finding.worst_phase + 0.5) / total, plot.y(high) - 7, words.number(worst), "value")
    phase_axis(plot, finding, f"phase: position of the record's first token, mod {total}")
    legend = [("bar", "accuracy, with 95 % interval")]
    if any(is_weak(finding, phase) for phase in range(total)):
        legend.append(("bar weak", "weak phase"))
    if finding.boundary_phases:
        legend.append(("edge", "record straddles a chunk edge"))
    if control is not None:
        legend.append(("control", "control model"))
    legend.append(("fit", "fitted wave"))
    return Figure(
        key="phases",
        title="Accuracy by phase",
        svg=plot.markup(),
        legend=tuple(legend),
        reading=(
            "Each bar is the share of right answers when the record that was asked for began at that "
            "phase; nothing else in the prompt changed. The thin line on a bar is the range in which the "
            "true share lies with 95 % confidence. If the phase did not matter, all bars would be level. "
            "Orange bars lie below the mean by more than their interval. The dashed wave is the best fit "
            "with one cycle per period; a single bad phase is badly described by a wave, and the boundary "
            "contrast then says more. A control model without compression, where one took part, should be "
            "level."
        ),
    )


def phases_strip(finding: Finding) -> Markup:
    """Accuracy by phase as bars of a line's height, 0 to 1, to be compared between rows of a table."""
    total = finding.axis_tokens
    plot = Plot(f"accuracy by phase of {finding.target}", height_px=30, top_px=2, bottom_px=1)
    plot.line(0, 1, 0, 0, "base")
    for phase in range(total):
        value = words.at_phase(finding.accuracy_by_phase, phase)
        if value is not None:
            kind = "bar weak" if is_weak(finding, phase) else "bar"
            tooltip = f"phase {phase}: {words.number(value)}"
            plot.rect(*bar_place(phase, total, 0.75), 0, value, kind, tooltip)
    return plot.markup()


def _phase_mark(plot: Plot, finding: Finding, phase: int) -> None:
    """One phase: a bar, or a dot where there are too many for bars; a cross where nothing is known."""
    total = finding.axis_tokens
    value = words.at_phase(finding.accuracy_by_phase, phase)
    middle = (phase + 0.5) / total
    if value is None:
        plot.mark(middle, plot.base_px - 8, "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5", "unknown")
        return
    low, high = finding.interval_by_phase[phase]
    tooltip = f"phase {phase}: {words.number(value)} ({words.interval((low, high))})"
    weak = " weak" if is_weak(finding, phase) else ""
    if total <= MOST_BARS:
        plot.rect(*bar_place(phase, total), 0, value, "bar" + weak, tooltip)
        plot.line(middle, middle, low, high, "whisker")
    else:
        plot.line(middle, middle, low, high, "whisker faint" + weak)
        plot.dot(middle, value, 2.2, "point" + weak, tooltip)


def _control_mark(plot: Plot, control: Finding, phase: int) -> None:
    """The control's accuracy, beside the bar's middle so that both intervals stay readable."""
    total = control.axis_tokens
    value = words.at_phase(control.accuracy_by_phase, phase)
    if value is None:
        return
    if total > MOST_BARS:
        plot.dot((phase + 0.5) / total, value, 1.6, "control")
        return
    place = (phase + 0.9) / total
    low, high = control.interval_by_phase[phase]
    plot.line(place, place, low, high, "control-whisker")
    plot.mark(place, plot.y(value), DIAMOND, "control")


def _harmonic(finding: Finding) -> list[tuple[float, float]]:
    """The fitted wave as the schema defines it, from edge to edge of the plot."""
    total = finding.axis_tokens
    steps = 96
    points = []
    for step in range(steps + 1):
        residue = step / steps * total - 0.5
        angle = 2 * math.pi * residue / total - finding.harmonic_phase_radians
        points.append((step / steps, finding.accuracy + finding.amplitude * math.cos(angle)))
    return points


def scan_figure(finding: Finding) -> Figure | None:
    """Strength of every period of the scan, with the line above which one is significant."""
    strengths = [(test, words.finite(test.z)) for test in finding.scan]
    if not strengths:
        return None
    line = words.finite(finding.scan_line_z)
    top = max([z for _, z in strengths if z is not None] + [line or 0.0, 1.0])
    ticks = nice_ticks(0, top * 1.02)
    strongest = max(strengths, key=lambda pair: pair[1] if pair[1] is not None else -1.0)[0]
    plot = Plot(
        f"Periodogram over {len(strengths)} periods; strongest at {strongest.period_tokens} tokens "
        f"with z {words.number(strongest.z, 1)}; significant above {words.number(line, 1)}.",
        height_px=260,
        high=ticks[-1],
        bottom_px=48,
    )
    plot.value_axis(ticks, "strength z", 0 if ticks[-1] >= 4 else 1)
    for index, (test, z) in enumerate(strengths):
        middle = (index + 0.5) / len(strengths)
        found = test.period_tokens == finding.period_tokens
        echo = test.explained_by_tokens is not None
        kind = "stem weak" if found else "stem echo" if echo else "odd" if test.control else "stem"
        tooltip = (
            f"period {test.period_tokens}: z {words.number(z, 1)}, p {words.p_value(test.p_value)}, "
            f"adjusted {words.p_value(test.p_adjusted)}, amplitude {words.number(test.amplitude, 3)}"
            + (f", explained by period {test.explained_by_tokens}" if echo else "")
        )
        if z is not None:
            plot.line(middle, middle, 0, z, kind)
            plot.dot(middle, z, 4.5, kind, tooltip)
        plot.text(middle, plot.base_px + 16, str(test.period_tokens), "tick found" if found else "tick")
    if line is not None:
        plot.line(0, 1, line, line, "threshold")
    plot.text(0.5, plot.base_px + 42, "period, tokens (each its own step)", "axis")
    legend = [("stem", "possible period")]
    if finding.period_tokens is not None:
        legend.append(("stem weak", "period found"))
    if any(test.explained_by_tokens is not None for test in finding.scan):
        legend.append(("stem echo", "explained by it"))
    if any(test.control for test in finding.scan):
        legend.append(("odd", "odd: control"))
    if line is not None:
        legend.append(("threshold", "significant above"))
    return Figure(
        key="scan",
        title="Which period",
        svg=plot.markup(),
        legend=tuple(legend),
        reading=(
            "For every candidate period the chart shows how well the answers of all items agree on one "
            "wave of that period. Without an effect z is about 1. Above the dashed line a period is "
            "significant even though many were tried. A true period lifts others with it, its harmonics and, in "
            "a short window, its neighbours; the smallest one that explains the others is named, and those are "
            "pale. No known compressor uses odd periods: if a hollow mark rises above the line, suspect the "
            "set-up rather than the model."
        ),
    )


def log_probability_figure(finding: Finding, control: Finding | None) -> Figure | None:
    """Mean log-probability of the right answer by phase."""
    total = finding.axis_tokens
    curves: list[tuple[Finding, str]] = [(finding, "")]
    if control is not None:
        curves.append((control, "control"))
    known = [v for f, _ in curves for v in map(words.finite, f.log_probability_by_phase) if v is not None]
    if not any(words.finite(v) is not None for v in finding.log_probability_by_phase):
        return None
    ticks = nice_ticks(min(known), max([*known, min(known) + 0.1]))
    values = finding.log_probability_by_phase
    plot = Plot(
        "Log-probability of the right answer by phase: "
        + ", ".join(f"{phase}: {words.number(value)}" for phase, value in enumerate(values[:16]))
        + (", and so on." if len(values) > 16 else "."),
        height_px=260,
        low=ticks[0],
        high=ticks[-1],
        bottom_px=48,
    )
    step = ticks[1] - ticks[0]
    plot.value_axis(ticks, "log-probability (nats)", 0 if step >= 1 else 1 if step >= 0.1 else 2)
    for source, kind in reversed(curves):
        _value_line(plot, source, kind)
    phase_axis(plot, finding, f"phase, mod {total}")
    legend = [("line", "this model")]
    if len(curves) > 1:
        legend.append(("line control", "control model"))
    return Figure(
        key="log-probability",
        title="Log-probability by phase",
        svg=plot.markup(),
        legend=tuple(legend),
        reading=(
            "How likely the model found the right answer, averaged over items; 0 is certainty, -0.7 is "
            "even odds, -2.3 is one in ten. It is finer than right or wrong: a model can lean the wrong "
            "way at a phase long before its answers turn wrong. Dips at the same phases as in the chart of"
            " accuracy confirm each other."
        ),
    )


def _value_line(plot: Plot, finding: Finding, kind: str) -> None:
    """Log-probabilities as dots joined by lines; a line breaks where a phase is unknown."""
    total = finding.axis_tokens
    run: list[tuple[float, float]] = []
    dots: list[tuple[float, float, int]] = []
    for phase in range(total + 1):
        value = words.at_phase(finding.log_probability_by_phase, phase)
        if value is None or phase == total:
            plot.curve(run, f"line {kind}".strip())
            run = []
            continue
        run.append(((phase + 0.5) / total, value))
        dots.append((*run[-1], phase))
    for x, value, phase in dots:
        weak = " weak" if not kind and is_weak(finding, phase) else ""
        radius = 3.4 if total <= MOST_BARS else 1.6
        plot.dot(x, value, radius, (kind or "point") + weak, f"phase {phase}: {words.number(value)}")


def trend_figure(finding: Finding) -> Figure | None:
    """Accuracy by absolute position of the record."""
    bins = [b for b in finding.trend if words.finite(b.accuracy) is not None]
    if not bins:
        return None
    first, last = min(b.first_position_tokens for b in bins), max(b.last_position_tokens for b in bins)
    span = max(last + 1 - first, 1)
    plot = Plot(
        f"Accuracy by position of the record, tokens {first} to {last}: "
        + ", ".join(words.number(b.accuracy) for b in bins)
        + ".",
        height_px=260,
        bottom_px=48,
    )
    plot.value_axis([0, 0.25, 0.5, 0.75, 1], "accuracy", 2)
    for b in bins:
        left, right = (b.first_position_tokens - first) / span, (b.last_position_tokens + 1 - first) / span
        tooltip = (
            f"tokens {b.first_position_tokens} to {b.last_position_tokens}: {words.number(b.accuracy)} "
            f"({words.interval(b.interval)}), {b.prompts} prompts"
        )
        plot.line((left + right) / 2, (left + right) / 2, *b.interval, "whisker")
        plot.line(left, right, b.accuracy, b.accuracy, "level")
        plot.dot((left + right) / 2, b.accuracy, 3.4, "point", tooltip)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        plot.text(share, plot.base_px + 16, f"{round(first + share * (last - first)):,}", anchor=anchor)
    plot.text(0.5, plot.base_px + 42, "position of the record, tokens from the start", "axis")
    return Figure(
        key="trend",
        title="Trend along the context",
        svg=plot.markup(),
        legend=(("point", "accuracy, with 95 % interval"),),
        reading=(
            "Accuracy by where in the context the record stood, all phases together. Models often find "
            "records better near the end; such a slope is no phase effect. Starts were drawn at random, so"
            " that a slope cannot pass for a period."
        ),
    )


def boundary_figure(finding: Finding) -> Figure | None:
    """Records that straddle a chunk edge against those that do not."""
    contrast = finding.boundary
    if contrast is None:
        return None
    inside, across = words.finite(contrast.inside_accuracy), words.finite(contrast.straddling_accuracy)
    plot = Plot(
        f"Accuracy inside a chunk {words.number(inside)}, across a chunk edge {words.number(across)}.",
        height_px=172,
        top_px=14,
        bottom_px=48,
    )
    base, rows = (
        plot.base_px,
        ((inside, 32, "inside a chunk", "bar"), (across, 84, "across a chunk edge", "bar weak")),
    )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        plot.add(
            '<line class="{}" x1="{}%" x2="{}%" y1="10" y2="{}"/>',
            "base" if share == 0 else "grid",
            *_twice(share),
            base,
        )
        plot.text(share, base + 16, f"{share:.2f}")
    for value, y, name, kind in rows:
        plot.text(0, y - 7, f"{name}: {words.number(value)}", "row", "start", dx=6)
        if value is not None:
            plot.add('<rect class="{}" x="0" y="{}" width="{}%" height="16"/>', kind, y, f"{100 * value:.2f}")
    plot.text(0.5, base + 38, "accuracy", "axis")
    return Figure(
        key="boundary",
        title="Across a chunk edge",
        svg=plot.markup(),
        reading=(
            "Records cut by a chunk edge against records inside one chunk, compared within the same items."
            f" The difference is {words.number(contrast.difference_points, 1)} points; shift test p "
            f"{words.p_value(contrast.p_value)}, McNemar p {words.p_value(contrast.mcnemar_p_value)}. With "
            "long periods this finds a single bad phase that a wave cannot show."
        ),
    )


def _twice(share: float) -> Sequence[str]:
    return [f"{100 * share:g}"] * 2
