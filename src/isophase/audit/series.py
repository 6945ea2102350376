"""Is a short series periodic? For one prompt at many shifts, where there are no items to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_PERMUTATIONS = 1999
_TIE = 1e-6
_LAPS = 3


@dataclass(frozen=True, kw_only=True)
class SeriesPeriod:
    """The period that explains a series best.

    Attributes:
        period_tokens: smallest of the periods that explain it equally well.
        explained: adjusted share of variance, at most 1.
        p_value: share of random orders in which some candidate explains as much.
    """

    period_tokens: int
    explained: float
    p_value: float


def _explained(series: FloatArray, period: int) -> FloatArray:
    """Adjusted R squared of residue means, [B] for a series [B, K]; residues that occur once explain nothing."""
    length = series.shape[1]
    residues = np.arange(length) % period
    counts = np.bincount(residues, minlength=period)
    member = (residues[:, None] == np.arange(period)).astype(float)
    centred = series - series.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    within = total - ((centred @ member) ** 2 / counts).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 1.0 - (within / (length - period)) / (total / (length - 1))
    return np.where(total > 1e-12, share, -np.inf)


def series_period(values: Sequence[float], candidates: Sequence[int], *, seed: int = 0) -> SeriesPeriod | None:
    """Find a period in values at consecutive shifts.

    Residue means are compared by adjusted R squared (so that a long period is not preferred for its many
    means), and the largest over all candidates with the largest in random orders of the series, which allows
    for having tried several. A linear trend is taken out of values that are not 0 and 1. Random orders take
    neighbours to be independent. With a period that must recur three times, smooth series of 48 without any
    (autoregressive, 0 to 0.95) still pass for periodic at p < 0.05 in 3 to 10 % of 150 simulated cases: hold an
    unknown period to 0.01.

    Args:
        values: K finite numbers, by shift.
        candidates: periods in tokens; those that K does not hold three times are left out.
        seed: of the random orders.

    Returns:
        The best period whatever its p-value, or None: nothing varies, or nothing can be tested.
    """
    series = np.asarray(values, dtype=np.float64)
    length = len(series)
    periods = [p for p in sorted(set(candidates)) if p >= 2 and _LAPS * p <= length]
    if not periods or np.ptp(series) < 1e-9:
        return None
    place = np.arange(length) - (length - 1) / 2
    if set(np.unique(series)) - {0.0, 1.0}:
        series = series - place * (series @ place) / (place @ place)
    rng = np.random.default_rng([seed, 11])
    orders = np.stack([series, *(rng.permutation(series) for _ in range(_PERMUTATIONS))])
    table = np.stack([_explained(orders, period) for period in periods], axis=1)
    best = table.max(axis=1)
    observed = best[0]
    named = next(p for p, share in zip(periods, table[0], strict=True) if share >= observed - _TIE)
    return SeriesPeriod(
        period_tokens=named,
        explained=float(observed),
        p_value=float((1 + (best[1:] >= observed - _TIE).sum()) / (_PERMUTATIONS + 1)),
    )
