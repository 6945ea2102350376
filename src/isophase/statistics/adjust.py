"""Several tests at once: Holm, and Westfall-Young min-P over shared shifts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isophase.statistics.observations import FloatArray, as_float_array


def holm(p_values: Sequence[float] | FloatArray) -> FloatArray:
    """Holm's step-down adjustment (Holm 1979); valid however the tests depend on each other.

    Args:
        p_values: [K] raw p-values.

    Returns:
        [K] adjusted p-values in the order given.

    Raises:
        ValueError: a p-value is outside 0..1.
    """
    raw = as_float_array(p_values)
    if raw.ndim != 1 or np.any(~((raw >= 0) & (raw <= 1))):
        raise ValueError("p-values must be a flat list of numbers in 0..1")
    order = np.argsort(raw, kind="stable")
    steps = np.maximum.accumulate(raw[order] * np.arange(len(raw), 0, -1))
    adjusted = np.empty_like(raw)
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


@dataclass(frozen=True, eq=False)
class MinP:
    """Westfall-Young single-step adjustment of K statistics that share their shifts.

    Attributes:
        p_values: [K] each statistic on its own.
        p_adjusted: [K] share of draws whose smallest p-value is at most this one.
        critical: [K] smallest value at which each statistic is significant family-wise; inf if none is.
    """

    p_values: FloatArray
    p_adjusted: FloatArray
    critical: FloatArray


def min_p(draws: FloatArray, alpha: float = 0.05) -> MinP:
    """Adjust for many tests by the null distribution of the smallest p-value (Westfall & Young 1993).

    Each draw's own p-values are its ranks among all draws, the observed one included, so no assumption about
    the statistics' distribution or their dependence is needed.

    Args:
        draws: [B + 1, K] statistics, larger is stronger; row 0 is the observed data.
        alpha: family-wise level of `critical`.

    Returns:
        Raw and adjusted p-values of row 0, and the critical values.
    """
    total = len(draws)
    ordered = np.sort(draws, axis=0)
    ranks = np.stack(
        [(total - np.searchsorted(column, values)) / total for column, values in zip(ordered.T, draws.T, strict=True)],
        axis=1,
    )
    smallest = np.sort(ranks.min(axis=1))
    adjusted = np.searchsorted(smallest, ranks[0], side="right") / total
    # The largest rank p-value that fewer than alpha of all draws reach.
    allowed = smallest[smallest < smallest[min(int(alpha * total), total - 1)]]
    critical = np.full(draws.shape[1], np.inf)
    if allowed.size:
        for column in range(draws.shape[1]):
            reached = draws[ranks[:, column] <= allowed[-1], column]
            if reached.size:
                critical[column] = reached.min()
    return MinP(ranks[0], as_float_array(adjusted), critical)
