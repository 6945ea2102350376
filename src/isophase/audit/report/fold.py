"""A control model's answers on the axis of the target that it stands beside."""

from __future__ import annotations

from isophase.audit.schema import Finding
from isophase.statistics import wilson


def control_for(finding: Finding, control: Finding | None) -> Finding | None:
    """The control, its phases folded onto the finding's axis; None where that cannot be.

    Phases fold exactly if the control's axis is a multiple of the finding's: phase r of 4 is phases r and
    r + 4 of 8.

    Args:
        finding: whose axis counts.
        control: the control's finding, or None.

    Returns:
        A copy of the control in which everything by phase has the finding's axis.
    """
    if control is None or control.axis_tokens == finding.axis_tokens:
        return control
    axis, laps = finding.axis_tokens, control.axis_tokens // finding.axis_tokens
    if laps * axis != control.axis_tokens or not all(control.prompts_by_phase):
        return None
    accuracy: list[float | None] = []
    intervals: list[tuple[float, float]] = []
    prompts: list[int] = []
    log_probability: list[float | None] = []
    for phase in range(axis):
        places = range(phase, control.axis_tokens, axis)
        counts = [control.prompts_by_phase[p] for p in places]
        shares = [control.accuracy_by_phase[p] or 0.0 for p in places]
        logs = [control.log_probability_by_phase[p] for p in places]
        total = sum(counts)
        hits = sum(share * count for share, count in zip(shares, counts, strict=True))
        low, high = wilson(hits, total)
        accuracy.append(hits / total)
        intervals.append((float(low), float(high)))
        prompts.append(total)
        known = [log for log in logs if log is not None]
        weighted = sum(log * count for log, count in zip(known, counts, strict=False))
        log_probability.append(weighted / total if len(known) == len(logs) else None)
    return control.model_copy(
        update={
            "axis_tokens": axis,
            "accuracy_by_phase": accuracy,
            "interval_by_phase": intervals,
            "prompts_by_phase": prompts,
            "log_probability_by_phase": log_probability,
        }
    )
