"""The three-way verdict: sensitive, no sensitivity above the margin, or inconclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from isophase.statistics.adjust import holm
from isophase.statistics.amplitude import Amplitude, estimate_amplitude
from isophase.statistics.assessment import Assessment, Reason, Verdict
from isophase.statistics.contrast import (
    BoundaryContrast,
    boundary_contrast,
    contrast_weights,
    straddling_phases,
)
from isophase.statistics.harmonics import ResidueTest, residue_test
from isophase.statistics.intervals import Gap, accuracy_interval, cross_fitted_gap, table_by_residue
from isophase.statistics.observations import FloatArray, Observations
from isophase.statistics.power import prompts_needed, prompts_to_bound
from isophase.statistics.scan import DEFAULT_PERIODS, PeriodScan, scan_periods

ALPHA = 0.05
CEILING = 0.95
_DEFAULT_AXIS_TOKENS = 8
_NO_LIMIT = 1.0  # no accuracy can swing further


@dataclass(frozen=True)
class _Decision:
    verdict: Verdict
    reasons: list[Reason]
    effect: float = 0.0
    upper: float = _NO_LIMIT
    more_prompts: int | None = None


def assess(
    observations: Observations,
    stride: int | None,
    *,
    margin: float = 0.02,
    periods: Sequence[int] | None = None,
    controls: Sequence[int] = (),
    shifts: int = 9999,
    seed: int = 0,
    log_probabilities: FloatArray | None = None,
    resamples: int = 1000,
) -> Assessment:
    """Decide whether outcomes depend on the phase, and say how much and how surely.

    Known stride: three pre-declared tests, Holm-adjusted: harmonic 1, Cochran's Q, boundary contrast (two
    where no phase or every phase straddles); the scan is reported but does not decide. Unknown stride: the
    scan decides, by min-P.

    *sensitive*: an adjusted p is below 0.05 and the effect reaches the margin. The effect is half peak to
    trough, as measured by the tests that reject, each free of the upward bias of noise:

    - harmonic 1: the debiased amplitude;
    - Cochran's Q and the scan: the larger of that and half the cross-fitted gap. One bad residue of 128 has
      an amplitude of 2 / 128 of its depth in every harmonic, but swings by half its depth;
    - boundary: half the difference, less its noise.

    *none*: no adjusted p is below 0.05 and the 95 % upper limit of the amplitude (after a scan, the largest
    of all periods tested but controls) is below the margin. Otherwise *inconclusive*; always so if nothing was answered
    right, or if fewer than two items are complete.

    Args:
        observations: the run; items with a missing answer are dropped.
        stride: S in tokens, or None to scan.
        margin: smallest effect that matters, half peak to trough.
        periods: periods of the scan; None: the default ones.
        controls: further periods to scan, flagged as controls.
        shifts: B, 999 or more for a scan.
        seed: of shifts, splits and resamples; equal seeds give equal results.
        log_probabilities: [N, P] of the answers, for the table by phase only; values that are not finite are
            left out of it.
        resamples: of the item bootstrap.

    Returns:
        All numbers of a finding.

    Raises:
        ValueError: stride below 2, margin not above 0, or log_probabilities of another shape.
    """
    if stride is not None and stride < 2:
        raise ValueError(f"stride is {stride} tokens, the shortest that has phases is 2")
    if margin <= 0:
        raise ValueError(f"margin is {margin}, it must be above 0")
    usable = observations.complete()
    scan: PeriodScan | None = None
    if usable.items >= 2:
        scan = scan_periods(
            usable,
            sorted({*(DEFAULT_PERIODS if periods is None else periods), *([stride] if stride else [])}),
            controls=controls,
            shifts=shifts,
            seed=seed,
            margin=margin,
        )
    named = scan.period_tokens if scan else None
    axis = stride or named or _default_axis(scan, usable.window_tokens)
    testable = usable.items >= 2 and 2 <= axis <= usable.window_tokens

    test: ResidueTest | None = None
    boundary: BoundaryContrast | None = None
    effect = Amplitude(axis, 0.0, 0.0, _NO_LIMIT, 0.0, 0.0, 0.0, usable.prompts, 2)
    gap = Gap(0.0, (-100.0, 100.0), 0.0)
    if testable:
        effect = estimate_amplitude(usable, axis)
        gap = cross_fitted_gap(usable.lap_means(axis), resamples=resamples, seed=seed)
        if stride or named:
            weights = contrast_weights(axis, usable.span_tokens)
            test = residue_test(usable, axis, contrast=weights, shifts=shifts, seed=seed)
            if test.contrast_p_value is not None:
                boundary = boundary_contrast(usable, axis, test.contrast_p_value)

    described = usable if usable.items else observations
    p_values: dict[str, float] = {}
    p_adjusted: dict[str, float] = {}
    if stride and test is not None:
        p_values = {"harmonic": float(test.p_values[0]), "omnibus": test.q_p_value}
        if boundary is not None:
            p_values["boundary"] = boundary.p_value
        p_adjusted = dict(zip(p_values, holm(list(p_values.values())).tolist(), strict=True))
    elif not stride and scan is not None and scan.tests:
        leading = min(scan.tests, key=lambda entry: (entry.p_adjusted, -entry.z))
        p_values, p_adjusted = {"scan": leading.p_value}, {"scan": leading.p_adjusted}

    obstacles = _obstacles(described, usable, stride, scan)
    if obstacles:
        decision = _Decision("inconclusive", obstacles)
    elif stride:
        sizes = {"harmonic": effect.debiased, "omnibus": max(effect.debiased, gap.points / 200.0)}
        if boundary is not None:
            sizes["boundary"] = _boundary_effect(usable, axis)
        significant = [name for name, p in p_adjusted.items() if p < ALPHA]
        decision = _decide(significant, sizes, [effect], margin, len(p_values), usable)
    else:
        assert scan is not None
        significant = ["scan"] if named else []
        sizes = {"scan": max(effect.debiased, gap.points / 200.0)}
        # Controls are there to expose a confound; no compressor has such a period, so none has to be excluded.
        possible = [
            effect for entry, effect in zip(scan.tests, scan.effects, strict=True) if not entry.control
        ] or scan.effects
        decision = _decide(significant, sizes, possible, margin, len(scan.tests), usable)

    table = table_by_residue(described, axis)
    accuracy = float(np.nanmean(described.outcomes)) if described.prompts else 0.0
    known = table.mean[np.isfinite(table.mean)]
    uneven = known.size > 0 and bool(np.ptp(known) > 0)
    return Assessment(
        verdict=decision.verdict,
        reasons=decision.reasons + _caveats(usable, accuracy, stride, scan),
        stride_tokens=stride,
        period_tokens=(stride if decision.verdict == "sensitive" else None) if stride else named,
        axis_tokens=axis,
        effect=decision.effect,
        margin=margin,
        p_values=p_values,
        p_values_adjusted=p_adjusted,
        amplitude=effect.amplitude,
        amplitude_debiased=effect.debiased,
        amplitude_upper=effect.upper,
        deciding_upper=decision.upper,
        harmonic_phase_radians=effect.phase_radians,
        variance=effect.variance,
        boundary=boundary,
        scan=list(scan.tests) if scan else [],
        scan_line_z=scan.line_z if scan and scan.tests else None,
        scan_period_tokens=named,
        untestable_periods=list(scan.untestable) if scan else [],
        gap_points=gap.points,
        gap_interval_points=gap.interval_points,
        raw_gap_points=100.0 * float(np.ptp(known)) if known.size else 0.0,
        accuracy=accuracy,
        accuracy_interval=accuracy_interval(described),
        accuracy_by_phase=_or_none(table.mean),
        interval_by_phase=list(zip(table.lower.tolist(), table.upper.tolist(), strict=True)),
        prompts_by_phase=table.count.tolist(),
        log_probability_by_phase=_log_probability_by_phase(observations, log_probabilities, axis),
        worst_phase=int(np.nanargmin(table.mean)) if uneven else None,
        best_phase=int(np.nanargmax(table.mean)) if uneven else None,
        weak_phases=np.flatnonzero((table.count > 0) & (table.upper < accuracy)).tolist(),
        boundary_phases=straddling_phases(axis, observations.span_tokens) if stride or named else [],
        more_prompts_to_decide=decision.more_prompts,
        items=usable.items,
        dropped_items=usable.dropped_items,
        prompts=usable.prompts,
        shifts=shifts,
        seed=seed,
    )


def _default_axis(scan: PeriodScan | None, window_tokens: int) -> int:
    fitting = [entry.period_tokens for entry in scan.tests] if scan else []
    if window_tokens >= _DEFAULT_AXIS_TOKENS or not fitting:
        return min(_DEFAULT_AXIS_TOKENS, window_tokens)
    return max(fitting)


def _obstacles(
    described: Observations, usable: Observations, stride: int | None, scan: PeriodScan | None
) -> list[Reason]:
    """Why no test can decide, if so."""
    found: list[Reason] = []
    if usable.items < 2:
        found.append("too_few_items")
    if described.prompts and described.binary and not np.nansum(described.outcomes):
        found.append("accuracy_zero")
    if stride and stride > usable.window_tokens:
        found.append("window_shorter_than_stride")
    elif not stride and scan is not None and not scan.tests:
        found.append("no_period_testable")
    return found


def _caveats(usable: Observations, accuracy: float, stride: int | None, scan: PeriodScan | None) -> list[Reason]:
    """What a reader must know beside the verdict."""
    found: list[Reason] = []
    if usable.dropped_items:
        found.append("items_dropped")
    if usable.binary and accuracy >= CEILING:
        found.append("near_ceiling")
    if scan is None:
        return found
    if scan.untestable and not stride:
        found.append("periods_untestable")
    named = scan.period_tokens
    if named is None:
        return found
    if stride and named < stride and stride % named == 0:
        found.append("shorter_period_explains")
    elif stride and named != stride:
        found.append("other_period_found")
    if any(entry.control for entry in scan.tests if entry.period_tokens == named and named != stride):
        found.append("control_period_found")
    return found


def _decide(
    significant: Sequence[str],
    sizes: dict[str, float],
    effects: Sequence[Amplitude],
    margin: float,
    tests: int,
    usable: Observations,
) -> _Decision:
    """Hold the effect and the upper limits against the margin."""
    upper = max(effect.upper for effect in effects)
    codes: dict[str, Reason] = {
        "harmonic": "harmonic_significant",
        "omnibus": "omnibus_significant",
        "boundary": "boundary_significant",
        "scan": "scan_significant",
    }
    reasons = [codes[name] for name in significant]
    if significant:
        effect = max(sizes[name] for name in significant)
        if effect >= margin:
            return _Decision("sensitive", reasons, effect, upper, 0)
        # The effect is real and small: more prompts would only make it surer and no larger.
        return _Decision("inconclusive", [*reasons, "effect_below_margin"], effect, upper, None)
    effect = max(entry.debiased for entry in effects)
    if upper < margin:
        return _Decision("none", ["upper_limit_below_margin"], effect, upper, 0)
    missing = [_more_prompts(entry, margin, tests, usable) for entry in effects if entry.upper >= margin]
    known = [count for count in missing if count is not None]
    more = max(known) if len(known) == len(missing) else None
    return _Decision("inconclusive", ["nothing_significant", "upper_limit_above_margin"], effect, upper, more)


def _more_prompts(effect: Amplitude, margin: float, tests: int, usable: Observations) -> int | None:
    """Further prompts, in whole items, that should decide about one period.

    If the debiased amplitude reaches the margin, enough to find it with 90 % power; else enough to exclude
    the margin. The truth behind a small amplitude is taken to be at most half the margin; if that many
    prompts have already been spent, it is taken to be the amplitude itself.
    """
    columns = effect.prompts // usable.items
    if effect.noise_variance <= 0:
        need: int | None = math.ceil(math.log(ALPHA) / math.log1p(-margin)) + 1
    elif effect.debiased >= margin:
        need = prompts_needed(
            effect.noise_variance,
            effect.debiased,
            tests=tests,
            window_tokens=columns,
            degrees=effect.degrees,
        )
    else:
        half = min(effect.debiased, margin / 2)
        need = prompts_to_bound(effect.noise_variance, margin, half, effect.degrees)
        if need is not None and need <= effect.prompts:
            need = prompts_to_bound(effect.noise_variance, margin, effect.debiased, effect.degrees)
    if need is None:
        return None
    return max(1, math.ceil(need / columns) - usable.items) * usable.window_tokens


def _boundary_effect(usable: Observations, stride: int) -> float:
    """Half the boundary difference, less what noise adds to its square."""
    weights = contrast_weights(stride, usable.span_tokens)
    assert weights is not None
    differences = usable.lap_means(stride) @ weights
    noise = float(differences.var(ddof=1)) / len(differences)
    return math.sqrt(max(0.0, float(differences.mean()) ** 2 - noise)) / 2.0


def _log_probability_by_phase(
    observations: Observations, log_probabilities: FloatArray | None, axis: int
) -> list[float | None]:
    if log_probabilities is None:
        return [None] * axis
    values = np.asarray(log_probabilities, dtype=np.float64)
    if values.shape != observations.outcomes.shape:
        raise ValueError(f"log_probabilities have shape {values.shape}, outcomes {observations.outcomes.shape}")
    whole = np.isfinite(observations.outcomes).all(axis=1)
    if not whole.any():
        whole = np.ones(observations.items, dtype=np.bool_)
    kept = replace(
        observations,
        outcomes=np.where(np.isfinite(values), values, np.nan)[whole],
        positions=observations.positions[whole],
    )
    return _or_none(table_by_residue(kept, axis).mean)


def _or_none(values: FloatArray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
