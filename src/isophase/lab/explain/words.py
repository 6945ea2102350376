"""The findings of `explain` in sentences."""

from __future__ import annotations

from isophase.audit.report import number, phase_list
from isophase.lab.explain.curves import LEAST_ACCURACY, SMALLEST_GAP_POINTS
from isophase.lab.explain.schema import Curve, Cycling, Explanation, Knockout


def summary(found: Explanation) -> list[str]:
    """One sentence for each part of the findings."""
    sentences = [_gap(found), *_knockouts(found)]
    if found.gates:
        sentences.append(_gates(found))
    if found.baseline.accuracy < LEAST_ACCURACY:
        return sentences
    sentences += [_cycling(cycling) for cycling in found.cycling]
    sentences += [f"{cause.cause.capitalize()}: {_lower(cause.conclusion)}" for cause in found.causes]
    return sentences


def is_low(curve: Curve, phase: int) -> bool:
    """Whether a phase lies below the mean by more than its interval, and by enough to matter."""
    return curve.interval_by_phase[phase][1] < curve.accuracy and curve.gap_points >= SMALLEST_GAP_POINTS


def worst_phase(curve: Curve) -> int:
    """Phase of the lowest accuracy."""
    return curve.by_phase.index(min(curve.by_phase))


def _gap(found: Explanation) -> str:
    base = found.baseline
    if base.accuracy < LEAST_ACCURACY:
        return f"The model does not do the task (accuracy {number(base.accuracy)}): there is nothing to explain."
    if base.gap_points < SMALLEST_GAP_POINTS:
        return (
            f"Accuracy is {number(base.accuracy)} at every phase mod {found.axis_tokens}: there is no gap to explain."
        )
    low, high = base.gap_interval_points
    return (
        f"Accuracy falls from {number(max(base.by_phase))} to {number(min(base.by_phase))} at phase "
        f"{worst_phase(base)} of {found.axis_tokens}, a gap of {base.gap_points:.0f} points ({low:.0f} to {high:.0f})."
    )


def _knockouts(found: Explanation) -> list[str]:
    if not found.knockouts or found.baseline.accuracy < LEAST_ACCURACY:
        return []
    chosen = [k for k in found.knockouts if k.selective]
    if not chosen:
        flat = [k for k in found.knockouts if min(_known(k), default=0.0) > 0.5]
        tail = f"; {_names(flat)} matters at all phases alike" if flat else ""
        return [f"No knockout is selective for a phase{tail}."]
    return [_selective(k) for k in chosen]


def _selective(k: Knockout) -> str:
    lost = k.lost_share_by_phase
    heavy = [phase for phase, share in enumerate(lost) if share is not None and share > 0.5]
    light = [phase for phase, share in enumerate(lost) if share is not None and share < 0.1]
    most = max(share for share in lost if share is not None)
    sure = "" if k.surely_selective else " (the intervals do not settle it)"
    kind = " (its KV head)" if k.is_kv_head and k.kind == "layer" else ""
    return (
        f"Knocking out {k.name}{kind} costs {100 * most:.0f} % of the accuracy at phase {phase_list(heavy)} and less "
        f"than a tenth at {phase_list(light)}{sure}."
    )


def _gates(found: Explanation) -> str:
    static = [g.static_slots for g in found.gates]
    window = [g.per_window_slots for g in found.gates]
    slots = len(found.gates[0].weight_by_offset)
    return (
        f"On average the gates spread over {number(min(static), 1)} to {number(max(static), 1)} of {slots} slots, and "
        f"one window reads {number(min(window), 1)} to {number(max(window), 1)}."
    )


def _cycling(cycling: Cycling) -> str:
    whole, without, image = cycling.pooled
    text = (
        f"Cycling {cycling.parameters}: R\u00b2 {number(whole.r_squared)} over all phases, {number(without.r_squared)} "
        f"without the boundary phase"
    )
    if image.r_squared is not None:
        text += f", {number(image.r_squared)} without its image as well"
    moves = cycling.moving.gap_points
    if moves >= SMALLEST_GAP_POINTS:
        text += (
            f"; {moves:.0f} points move along, weakest where offset {worst_phase(cycling.moving)}'s parameters serve"
        )
    stays = cycling.staying.gap_points
    if stays >= SMALLEST_GAP_POINTS:
        text += f"; {stays:.0f} points stay, at phase {worst_phase(cycling.staying)}"
    return text.replace("-", "\u2212") + "."


def _known(k: Knockout) -> list[float]:
    return [share for share in k.lost_share_by_phase if share is not None]


def _names(units: list[Knockout]) -> str:
    return " and ".join(k.name for k in units)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
