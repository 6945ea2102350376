"""Published tables: counts or rates by residue, without items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlogy
from scipy.stats import chi2, f

from isophase.statistics.intervals import wilson
from isophase.statistics.observations import FloatArray, as_float_array


@dataclass(frozen=True, eq=False)
class CountSummary:
    """Accuracy by residue from counts; everything in points.

    Attributes:
        mean: over all prompts.
        mean_interval: Wilson.
        accuracy: [m] by residue.
        lower: [m] Wilson bound.
        upper: [m] Wilson bound.
        worst: smallest accuracy.
        best: largest accuracy.
        worst_phase: residue of `worst`.
        best_phase: residue of `best`.
        gap: best minus worst.
        gap_interval: Newcombe's (1998, method 10) interval from the two Wilson intervals. It treats the two
            residues as chosen beforehand, as the field does, so it inherits the upward bias of max - min.
        period_tokens: smallest period that explains the table, or None.
    """

    mean: float
    mean_interval: tuple[float, float]
    accuracy: FloatArray
    lower: FloatArray
    upper: FloatArray
    worst: float
    best: float
    worst_phase: int
    best_phase: int
    gap: float
    gap_interval: tuple[float, float]
    period_tokens: int | None


def _checked(correct: ArrayLike, trials: ArrayLike) -> tuple[FloatArray, FloatArray]:
    hits = as_float_array(correct)
    if hits.ndim != 1 or not len(hits):
        raise ValueError(f"counts must be a flat list, got shape {hits.shape}")
    total = np.broadcast_to(as_float_array(trials), hits.shape).astype(np.float64)
    if np.any(total <= 0) or np.any(hits < 0) or np.any(hits > total):
        raise ValueError("every residue needs prompts, and right answers between 0 and their number")
    return hits, total


def summarise_counts(correct: ArrayLike, prompts_per_residue: ArrayLike) -> CountSummary:
    """Summarise right answers by residue as the field prints them, with intervals.

    Args:
        correct: [m] right answers.
        prompts_per_residue: [m] prompts, or one number for all.

    Returns:
        Mean, worst, best and gap in points.

    Raises:
        ValueError: shapes differ, a residue has no prompts, or counts do not fit.
    """
    hits, total = _checked(correct, prompts_per_residue)
    share = hits / total
    lower, upper = wilson(hits, total)
    mean_low, mean_high = wilson(hits.sum(), total.sum())
    worst, best = int(share.argmin()), int(share.argmax())
    gap = float(share[best] - share[worst])
    down = float(np.hypot(share[best] - lower[best], upper[worst] - share[worst]))
    up = float(np.hypot(upper[best] - share[best], share[worst] - lower[worst]))
    return CountSummary(
        mean=100.0 * float(hits.sum() / total.sum()),
        mean_interval=(100.0 * float(mean_low), 100.0 * float(mean_high)),
        accuracy=100.0 * share,
        lower=100.0 * lower,
        upper=100.0 * upper,
        worst=100.0 * float(share[worst]),
        best=100.0 * float(share[best]),
        worst_phase=worst,
        best_phase=best,
        gap=100.0 * gap,
        gap_interval=(100.0 * (gap - down), 100.0 * (gap + up)),
        period_tokens=period_of_counts(hits, total),
    )


def _deviance(hits: FloatArray, total: FloatArray, period: int) -> float:
    """Minus twice the binomial log-likelihood of one rate per residue mod `period`."""
    pooled_hits = hits.reshape(-1, period).sum(axis=0)
    pooled_total = total.reshape(-1, period).sum(axis=0)
    share = pooled_hits / pooled_total
    log_likelihood = xlogy(pooled_hits, share) + xlogy(pooled_total - pooled_hits, 1.0 - share)
    return -2.0 * float(log_likelihood.sum())


def period_of_counts(
    correct: ArrayLike, prompts_per_residue: ArrayLike, *, alpha: float = 0.05, share: float = 0.95
) -> int | None:
    """Smallest period that explains what a table by residue mod m shows.

    Models with one rate per residue mod d are nested for d dividing m. The full table must beat a single
    rate (likelihood-ratio chi-square, level alpha). Then the smallest d wins that either leaves nothing
    significant to the full table, or explains `share` of its deviance beyond what noise alone takes (its
    degrees of freedom): large counts make any residual trend significant, and that is not a longer period.

    Args:
        correct: [m] right answers.
        prompts_per_residue: [m] prompts, or one number for all.
        alpha: level.
        share: part of the explained deviance that is enough.

    Returns:
        The period in residues, or None where the table is flat.
    """
    hits, total = _checked(correct, prompts_per_residue)
    m = len(hits)
    full = _deviance(hits, total, m)
    excess = _deviance(hits, total, 1) - full
    if m < 2 or chi2.sf(excess, m - 1) > alpha:
        return None
    for period in (d for d in range(2, m) if m % d == 0):
        left = _deviance(hits, total, period) - full
        explained = 1.0 - (left - (m - period)) / (excess - (m - 1))
        if chi2.sf(left, m - period) > alpha or explained >= share:
            return period
    return m


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Lines of one series.

    Attributes:
        periods: [L // 2] L / k for k = 1.., longest first.
        power: [L // 2] share of the detrended variance; sums to 1 (0 for a straight line).
    """

    periods: FloatArray
    power: FloatArray


def spectrum(series: ArrayLike) -> Spectrum:
    """Spectrum of a series after its straight-line trend is removed.

    Args:
        series: [L] values at consecutive positions, L at least 4.

    Returns:
        Periods in positions, and each line's share of the variance.

    Raises:
        ValueError: the series is too short, not flat or not finite.
    """
    values = _checked_series(series)
    length = len(values)
    steps = np.arange(length) - (length - 1) / 2
    centred = values - values.mean()
    detrended = centred - steps * float(steps @ centred / (steps @ steps))
    power = np.abs(np.fft.rfft(detrended))[1:] ** 2
    power[: (length - 1) // 2] *= 2.0  # mirror images; the middle line of an even length has none
    total = float(power.sum())
    shares = power / total if total > 1e-20 * length else np.zeros_like(power)
    return Spectrum(length / np.arange(1, length // 2 + 1), as_float_array(shares))


def dominant_period(series: ArrayLike, *, alpha: float = 0.05) -> int | None:
    """Smallest whole period whose residue means explain a series best beyond its straight-line trend.

    The largest spectral line would be the wrong answer for a pattern with one weak phase in eight: most of
    its power may sit at period 2. Each period d fits one mean per residue beside the trend; adjusted R^2,
    relative to the trend alone, weighs fit against the d - 1 means it costs, so a multiple of the true
    period does not win. The winner must pass its F-test at alpha, divided by the number of periods tried.

    Args:
        series: [L] values at consecutive positions, L at least 4.
        alpha: level.

    Returns:
        A period of 2 to L / 2 positions, or None where none stands out.

    Raises:
        ValueError: as `spectrum`.
    """
    values = _checked_series(series)
    length = len(values)
    steps = np.arange(length)
    trend = np.stack([np.ones(length), steps - steps.mean()], axis=1)
    base = _residual_sum(trend, values)
    if base <= 1e-20 * length:
        return None
    candidates = [d for d in range(2, length // 2 + 1) if length - d - 1 >= 1]
    best_period, best_score, best_p = None, 0.0, 1.0
    for period in candidates:
        means = (steps[:, None] % period == np.arange(period)).astype(np.float64)
        left = _residual_sum(np.hstack([means, trend[:, 1:]]), values) / base
        freedom = length - period - 1
        score = 1.0 - left * (length - 2) / freedom
        if score > best_score + 1e-9:
            ratio = (1.0 - left) / (period - 1) / max(left / freedom, 1e-300)
            best_period, best_score, best_p = period, score, float(f.sf(ratio, period - 1, freedom))
    return best_period if best_p <= alpha / len(candidates) else None


def _residual_sum(design: FloatArray, values: FloatArray) -> float:
    coefficients = np.linalg.lstsq(design, values, rcond=None)[0]
    return float(((values - design @ coefficients) ** 2).sum())


def _checked_series(series: ArrayLike) -> FloatArray:
    values = as_float_array(series)
    if values.ndim != 1 or len(values) < 4 or not np.isfinite(values).all():
        raise ValueError("a series must be a flat list of at least 4 finite values")
    return values
