"""Accuracy by residue with intervals, and the gap between the best and the worst residue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from isophase.statistics.observations import FloatArray, IntArray, Observations, as_float_array


def wilson(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> tuple[FloatArray, FloatArray]:
    """Two-sided Wilson score interval of a proportion (Wilson 1927), element by element.

    Args:
        successes: any shape, 0 to trials.
        trials: same shape; 0 gives the interval 0 to 1.
        confidence: two-sided coverage.

    Returns:
        Lower and upper bounds, same shape.

    Raises:
        ValueError: successes are negative or exceed the trials.
    """
    hits, total = np.broadcast_arrays(as_float_array(successes), as_float_array(trials))
    if np.any(hits < 0) or np.any(hits > total):
        raise ValueError("successes must lie between 0 and the number of trials")
    z = float(norm.ppf(0.5 + confidence / 2))
    safe = np.where(total > 0, total, 1.0)
    share = hits / safe
    centre = (share + z**2 / (2 * safe)) / (1 + z**2 / safe)
    half = z / (1 + z**2 / safe) * np.sqrt(share * (1 - share) / safe + z**2 / (4 * safe**2))
    lower = np.where((total > 0) & (hits > 0), np.clip(centre - half, 0, 1), 0.0)
    upper = np.where((total > 0) & (hits < total), np.clip(centre + half, 0, 1), 1.0)
    return as_float_array(lower), as_float_array(upper)


@dataclass(frozen=True, eq=False)
class ResidueTable:
    """Outcomes by residue.

    Attributes:
        mean: [m] mean outcome; NaN where there is none.
        lower: [m] 95 % bound; Wilson for outcomes 0 and 1, else normal.
        upper: [m] 95 % bound.
        count: [m] outcomes.
    """

    mean: FloatArray
    lower: FloatArray
    upper: FloatArray
    count: IntArray


def table_by_residue(observations: Observations, period_tokens: int) -> ResidueTable:
    """Mean outcome, interval and count of every residue.

    The window is cut to whole laps where it holds one; a shorter window is used as it is.

    Args:
        observations: missing outcomes are left out.
        period_tokens: m, at least 1.

    Returns:
        The table; residues that no position has get NaN, the widest interval and 0.
    """
    data = observations
    if 2 <= period_tokens <= data.window_tokens:
        data = data.window_for(period_tokens)
    present = np.isfinite(data.outcomes)
    residues = (data.positions % period_tokens)[present]
    values = data.outcomes[present]
    count = np.bincount(residues, minlength=period_tokens).astype(np.int64)
    total = np.bincount(residues, weights=values, minlength=period_tokens)
    mean = np.divide(total, count, out=np.full(period_tokens, np.nan), where=count > 0)
    if data.binary:
        lower, upper = wilson(total, count)
    else:
        squares = np.bincount(residues, weights=(values - mean[residues]) ** 2, minlength=period_tokens)
        degrees = np.maximum(count - 1, 1)
        half = float(norm.ppf(0.975)) * np.sqrt(squares / degrees / np.maximum(count, 1))
        lower, upper = mean - half, mean + half
    return ResidueTable(mean, as_float_array(lower), as_float_array(upper), count)


def accuracy_interval(observations: Observations) -> tuple[float, float]:
    """95 % interval of the overall accuracy, allowing for outcomes of one item being alike.

    Wilson's formula with the number of independent outcomes that would give the observed spread of item means
    (effective sample size, Korn & Graubard 1998); it never exceeds the number of outcomes.

    Args:
        observations: missing outcomes are left out; real scores get the normal interval over items.

    Returns:
        Bounds; 0 and 1 where there is no outcome.
    """
    present = np.isfinite(observations.outcomes)
    total = int(present.sum())
    if total == 0:
        return 0.0, 1.0
    accuracy = float(observations.outcomes[present].mean())
    counts = present.sum(axis=1)
    hits = np.where(present, observations.outcomes, 0.0).sum(axis=1)
    items = int((counts > 0).sum())
    # Linearised variance of a ratio of item totals.
    spread = float(((hits - accuracy * counts) ** 2).sum()) / total**2 * items / max(items - 1, 1)
    if not observations.binary:
        half = float(norm.ppf(0.975)) * spread**0.5
        return accuracy - half, accuracy + half
    effective = float(total)
    if spread > 0:
        effective = min(effective, accuracy * (1 - accuracy) / spread)
    lower, upper = wilson(accuracy * effective, effective)
    return float(lower), float(upper)


@dataclass(frozen=True)
class Gap:
    """Best minus worst residue.

    Attributes:
        points: cross-fitted estimate; about 0 on average where there is no effect.
        interval_points: 95 % percentile interval over item resamples.
        raw_points: largest minus smallest mean, as the field reports it; biased upward.
    """

    points: float
    interval_points: tuple[float, float]
    raw_points: float


def gap_draws(lap_means: FloatArray, *, splits: int = 20, resamples: int = 1000, seed: int = 0) -> FloatArray:
    """Cross-fitted gap of the data, then of `resamples` item resamples. Arguments as in `cross_fitted_gap`.

    Equal seeds draw equal splits and weights for tables of equally many items, so draws of two models on
    the same items are paired.

    Returns:
        [1 + resamples] gaps in points, the estimate first.
    """
    items = len(lap_means)
    rng = np.random.default_rng([seed, 3])
    weights = np.vstack([np.ones(items), rng.exponential(size=(resamples, items))])
    gaps = np.zeros(len(weights))
    for _ in range(splits):
        order = rng.permutation(items)
        first, second = order[: items // 2], order[items // 2 :]
        means = [
            weights[:, half] @ lap_means[half] / weights[:, half].sum(axis=1, keepdims=True) for half in (first, second)
        ]
        for choose, measure in (means, means[::-1]):
            best = np.take_along_axis(measure, choose.argmax(axis=1)[:, None], axis=1)[:, 0]
            worst = np.take_along_axis(measure, choose.argmin(axis=1)[:, None], axis=1)[:, 0]
            gaps += best - worst
    return as_float_array(gaps * (100.0 / (2 * splits)))


def cross_fitted_gap(lap_means: FloatArray, *, splits: int = 20, resamples: int = 1000, seed: int = 0) -> Gap:
    """Gap whose residues are chosen on half of the items and measured on the other half.

    Both directions of `splits` random half-splits are averaged. For the interval, items are resampled within
    their half: the original items are split first, so that no item can help to choose a residue in one half
    and vouch for it in the other. Resampling draws exponential weights per item instead of counts (Bayesian
    bootstrap, Rubin 1981), which leaves no half empty; one set of weights serves all splits of a resample,
    because the estimate is an average over splits.

    Args:
        lap_means: [N, m] mean outcome by item and residue.
        splits: random half-splits to average.
        resamples: bootstrap resamples.
        seed: of splits and resamples.

    Returns:
        Estimate, interval and raw gap in points; with fewer than two items nothing can be cross-fitted and
        the interval is -100 to 100.
    """
    items = len(lap_means)
    raw = 100.0 * float(np.ptp(lap_means.mean(axis=0))) if items else 0.0
    if items < 2:
        return Gap(0.0, (-100.0, 100.0), raw)
    gaps = gap_draws(lap_means, splits=splits, resamples=resamples, seed=seed)
    low, high = np.quantile(gaps[1:], [0.025, 0.975])
    # The point estimate uses no weights and may fall outside at very few items; the interval holds it.
    return Gap(float(gaps[0]), (min(float(low), float(gaps[0])), max(float(high), float(gaps[0]))), raw)
