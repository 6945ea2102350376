"""The charts of an explanation, drawn with the audit report's board and colours."""

from __future__ import annotations

from collections.abc import Sequence

from isophase.audit.report import (
    DIAMOND,
    MOST_BARS,
    TRIANGLE,
    Figure,
    Plot,
    bar_place,
    interval,
    nice_ticks,
    number,
    tick_step,
)
from isophase.lab.explain.schema import Curve, Cycling, CyclingShift, Explanation, GateProfile, Knockout, TrainingStep
from isophase.lab.explain.words import is_low

MOST_PROFILES = 16

_BARS_READING = (
    "Each bar is the share of right answers when the queried record began at that phase; the thin line is the "
    "range in which the true share lies with 95 % confidence."
)


def baseline_figure(found: Explanation) -> Figure:
    """Accuracy by phase of the model as it is."""
    return _curve_figure(
        "phases", "Accuracy by phase, model as it is", found.baseline, found.boundary_phases, height_px=300
    )


def knockout_figure(found: Explanation, unit: Knockout) -> Figure:
    """Accuracy by phase with one unit knocked out, over the model as it is."""
    return _curve_figure(
        "knockout",
        f"Without {unit.name}",
        unit.after,
        found.boundary_phases,
        marks=found.baseline.by_phase,
        meaning="model as it is",
        reading=_BARS_READING
        + " Here the unit's output at the answering position is replaced by its mean over all prompts. Bars that "
        "stay at their diamonds do not need the unit; bars that fall do.",
    )


def shift_figure(found: Explanation, cycling: Cycling, shift: CyclingShift) -> Figure:
    """Accuracy by phase under one roll, with what the roll predicts."""
    delta = f"{shift.delta_tokens:+d}".replace("-", "\u2212")
    return _curve_figure(
        "cycling",
        f"{cycling.parameters.capitalize()} rolled by {delta}: R\u00b2 {_signed(shift.r_squared)}",
        shift.observed,
        found.boundary_phases,
        marks=shift.predicted_by_phase,
        meaning="predicted",
        reading=_BARS_READING
        + " The diamonds are the original curve, moved as far as the parameters were. Bars that follow their diamonds "
        "are weak because of the parameters at their offset; a bar that stays low has another cause.",
    )


def part_figures(cycling: Cycling, boundary: Sequence[int]) -> list[Figure]:
    """What moves with the parameters, and what stays with the phase."""
    return [
        _curve_figure(
            "moving",
            f"Moves with the {cycling.parameters}",
            cycling.moving,
            [],
            axis="offset that the parameters at the record's first token came from",
            reading="All rolls together: accuracy by the offset that the parameters were trained at, each met at all "
            "phases. A low bar is a weakness that goes where these parameters go (slot).",
        ),
        _curve_figure(
            "staying",
            "Stays with the phase",
            cycling.staying,
            boundary,
            reading="All rolls together: accuracy by phase, each phase served by the parameters of all offsets. A low "
            "bar is a weakness that no choice of parameters takes away (straddle, anchor or visibility).",
        ),
    ]


def _curve_figure(
    key: str,
    title: str,
    curve: Curve,
    boundary: Sequence[int],
    *,
    height_px: int = 240,
    marks: Sequence[float] | None = None,
    meaning: str = "",
    axis: str = "phase of the record's first token",
    reading: str = _BARS_READING,
) -> Figure:
    total = len(curve.by_phase)
    spoken = ", ".join(f"{phase}: {number(value)}" for phase, value in enumerate(curve.by_phase[:16]))
    plot = Plot(f"{title}. Accuracy by phase: {spoken}.", height_px=height_px, bottom_px=48)
    plot.value_axis([0, 0.25, 0.5, 0.75, 1], "accuracy", 2)
    for phase, value in enumerate(curve.by_phase):
        low, high = curve.interval_by_phase[phase]
        middle = (phase + 0.5) / total
        weak = " weak" if is_low(curve, phase) else ""
        tooltip = f"phase {phase}: {number(value)} ({interval((low, high))})"
        if total <= MOST_BARS:
            plot.rect(*bar_place(phase, total), 0, value, "bar" + weak, tooltip)
            plot.line(middle, middle, low, high, "whisker")
        else:
            plot.line(middle, middle, low, high, "whisker faint" + weak)
            plot.dot(middle, value, 2.2, "point" + weak, tooltip)
    for phase, value in enumerate(marks or ()):
        if total <= MOST_BARS:
            plot.mark((phase + 0.88) / total, plot.y(value), DIAMOND, "control")
        else:
            plot.dot((phase + 0.5) / total, value, 1.6, "control")
    for phase in range(0, total, tick_step(total)):
        plot.text((phase + 0.5) / total, plot.base_px + 16, str(phase))
    for phase in boundary:
        plot.mark((phase + 0.5) / total, plot.base_px + 21, TRIANGLE, "edge")
    plot.text(0.5, plot.base_px + 42, f"{axis}, mod {total}", "axis")
    legend = [("bar", "accuracy, with 95 % interval")]
    if any(is_low(curve, phase) for phase in range(total)):
        legend.append(("bar weak", "weak"))
    if marks is not None:
        legend.append(("control", meaning))
    if boundary:
        legend.append(("edge", "record straddles a chunk edge"))
    return Figure(key=key, title=title, svg=plot.markup(), legend=tuple(legend), reading=reading)


def profile_figures(profiles: Sequence[GateProfile]) -> list[Figure]:
    """Mean gate weight by offset; none where there are too many heads to look at."""
    if len(profiles) > MOST_PROFILES:
        return []
    return [_profile_figure(profile) for profile in profiles]


def _profile_figure(profile: GateProfile) -> Figure:
    weights = profile.weight_by_offset
    total = len(weights)
    ticks = nice_ticks(0, max([*weights, 1 / total]) * 1.05)
    title = f"Layer {profile.layer}, {profile.branch}, KV head {profile.kv_head}"
    spoken = ", ".join(number(weight) for weight in weights[:16])
    plot = Plot(f"{title}: mean gate weight by offset: {spoken}.", height_px=200, low=0, high=ticks[-1], bottom_px=48)
    plot.value_axis(ticks, "mean weight", 2)
    for offset, weight in enumerate(weights):
        plot.rect(*bar_place(offset, total), 0, weight, "bar", f"offset {offset}: {number(weight, 3)}")
    plot.line(0, 1, 1 / total, 1 / total, "threshold")
    for offset in range(0, total, tick_step(total)):
        plot.text((offset + 0.5) / total, plot.base_px + 16, str(offset))
    plot.text(0.5, plot.base_px + 42, "offset in the window", "axis")
    return Figure(
        key="profile",
        title=title,
        svg=plot.markup(),
        legend=(("bar", "mean weight"), ("threshold", "all slots alike")),
        reading=(
            f"How much each slot of a window weighs on average. These means spread over "
            f"{number(profile.static_slots, 1)} slots; a single window reads "
            f"{number(profile.per_window_slots, 1)}. Few in both: the gate keeps to its slots. Many on average "
            "and few in each window: it picks by content."
        ),
    )


def training_figure(steps: Sequence[TrainingStep]) -> Figure | None:
    """Concentration of the gates through training, averaged over heads."""
    known = [step for step in steps if step.gates]
    if len(known) < 2:
        return None
    static = [_mean([g.static_slots for g in step.gates]) for step in known]
    window = [_mean([g.per_window_slots for g in step.gates]) for step in known]
    ticks = nice_ticks(1, max([*static, *window, 1.5]))
    plot = Plot(
        f"Effective slots of the gates from step {known[0].step} to {known[-1].step}: of the mean weights from "
        f"{number(static[0], 1)} to {number(static[-1], 1)}, of one window from "
        f"{number(window[0], 1)} to {number(window[-1], 1)}.",
        height_px=240,
        low=ticks[0],
        high=ticks[-1],
        bottom_px=48,
    )
    plot.value_axis(ticks, "effective slots", 1)
    span = max(known[-1].step - known[0].step, 1)
    places = [(step.step - known[0].step) / span for step in known]
    for values, kind in ((static, ""), (window, "control")):
        plot.curve(list(zip(places, values, strict=True)), f"line {kind}".strip())
        for place, value in zip(places, values, strict=True):
            plot.dot(place, value, 3, kind or "point", number(value, 2))
    for place, step, anchor in ((0.0, known[0].step, "start"), (1.0, known[-1].step, "end")):
        plot.text(place, plot.base_px + 16, f"{step:,}", anchor=anchor)
    plot.text(0.5, plot.base_px + 42, "training step", "axis")
    return Figure(
        key="training",
        title="Concentration through training",
        svg=plot.markup(),
        legend=(("line", "of the mean weights"), ("line control", "of one window")),
        reading=(
            "How many slots share the weight: of the weights averaged over windows, and of each window by itself, "
            "averaged. Where only the second falls, gates learn to choose by content; where both fall, they settle on "
            "slots."
        ),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _signed(value: float | None) -> str:
    return number(value).replace("-", "\u2212")
