"""Everything that one assessment found, as plain numbers ready for a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isophase.statistics.contrast import BoundaryContrast
from isophase.statistics.scan import PeriodTest

Verdict = Literal["sensitive", "none", "inconclusive"]

Reason = Literal[
    # what decided
    "harmonic_significant",
    "omnibus_significant",
    "boundary_significant",
    "scan_significant",
    "upper_limit_below_margin",
    # why nothing could be decided
    "nothing_significant",
    "upper_limit_above_margin",
    "effect_below_margin",
    "too_few_items",
    "window_shorter_than_stride",
    "no_period_testable",
    "accuracy_zero",
    # what weakens the verdict
    "items_dropped",
    "near_ceiling",
    "periods_untestable",
    "shorter_period_explains",
    "other_period_found",
    "control_period_found",
]


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Verdict and numbers of `assess`. Lists by phase run over residues 0..axis_tokens - 1.

    Attributes:
        verdict: sensitive, none (no sensitivity above the margin) or inconclusive.
        reasons: codes, first what decided, then what weakens the verdict.
        stride_tokens: the stride that the tests were told, or None for a scan.
        period_tokens: the stride (if sensitive) or the period that the scan named, or None.
        axis_tokens: the stride, else the period named, else 8 or the largest period that fits.
        effect: half peak to trough that was held against the margin.
        margin: smallest effect that matters.
        p_values: harmonic, omnibus, boundary; or scan, that of its strongest period.
        p_values_adjusted: Holm; min-P for a scan.
        amplitude: half peak to trough of harmonic 1 of the axis.
        amplitude_debiased: the same less what noise adds.
        amplitude_upper: 95 % upper limit of the amplitude on the axis.
        deciding_upper: what was held against the margin for "none": `amplitude_upper`, or after a scan the
            largest limit of all periods tested.
        harmonic_phase_radians: the fit is accuracy + amplitude cos(2 pi r / axis - this).
        variance: v, of one outcome around its item's mean.
        boundary: straddling records against the others, or None where there is no such contrast.
        scan: one test per period.
        scan_line_z: family-wise 5 % line of the scan, or None without a scan.
        scan_period_tokens: period that the scan names, also where it does not decide.
        untestable_periods: periods longer than the window.
        gap_points: cross-fitted best minus worst.
        gap_interval_points: item bootstrap.
        raw_gap_points: max - min.
        accuracy: over all answers of complete items (of any item where none is complete).
        accuracy_interval: 95 %, allowing for items.
        accuracy_by_phase: mean outcome; None where there is no answer.
        interval_by_phase: Wilson, 95 %.
        prompts_by_phase: answers.
        log_probability_by_phase: None where there is none.
        worst_phase: None where all phases are equal.
        best_phase: None where all phases are equal.
        weak_phases: phases whose interval lies below the accuracy.
        boundary_phases: phases at which the record straddles a chunk edge; empty without stride or period.
        more_prompts_to_decide: 0 where decided; None where more of the same would not decide.
        items: complete items.
        dropped_items: items with a missing answer.
        prompts: answers of complete items.
        shifts: B.
        seed: of shifts, splits and resamples.
    """

    verdict: Verdict
    reasons: list[Reason]
    stride_tokens: int | None
    period_tokens: int | None
    axis_tokens: int
    effect: float
    margin: float
    p_values: dict[str, float]
    p_values_adjusted: dict[str, float]
    amplitude: float
    amplitude_debiased: float
    amplitude_upper: float
    deciding_upper: float
    harmonic_phase_radians: float
    variance: float
    boundary: BoundaryContrast | None
    scan: list[PeriodTest]
    scan_line_z: float | None
    scan_period_tokens: int | None
    untestable_periods: list[int]
    gap_points: float
    gap_interval_points: tuple[float, float]
    raw_gap_points: float
    accuracy: float
    accuracy_interval: tuple[float, float]
    accuracy_by_phase: list[float | None]
    interval_by_phase: list[tuple[float, float]]
    prompts_by_phase: list[int]
    log_probability_by_phase: list[float | None]
    worst_phase: int | None
    best_phase: int | None
    weak_phases: list[int]
    boundary_phases: list[int]
    more_prompts_to_decide: int | None
    items: int
    dropped_items: int
    prompts: int
    shifts: int
    seed: int
