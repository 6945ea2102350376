"""Two models on the same prompts: the paired contrast.

The difference of two outcomes of the same item at the same position is itself an outcome, so every
test by residue applies to it unchanged: it asks whether the models' curves over the phases differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from isophase.statistics.harmonics import residue_test
from isophase.statistics.intervals import gap_draws
from isophase.statistics.observations import Observations


@dataclass(frozen=True, kw_only=True)
class PairedContrast:
    """First minus second, on items that both answered completely.

    Attributes:
        axis_tokens: period of the phase axis.
        items: items that count.
        accuracy_points: difference of the accuracies.
        accuracy_interval_points: 95 %, from item means.
        gap_points: difference of the cross-fitted gaps.
        gap_interval_points: 95 %, from a bootstrap over items, the same items for both models.
        by_phase_points: difference of the accuracies by phase.
        harmonic_p_value: shift test of harmonic 1 of the difference.
        omnibus_p_value: shift test of Cochran's Q of the difference.
    """

    axis_tokens: int
    items: int
    accuracy_points: float
    accuracy_interval_points: tuple[float, float]
    gap_points: float
    gap_interval_points: tuple[float, float]
    by_phase_points: list[float]
    harmonic_p_value: float
    omnibus_p_value: float


def paired_contrast(
    first: Observations,
    second: Observations,
    axis_tokens: int,
    *,
    shifts: int = 9999,
    resamples: int = 1000,
    seed: int = 0,
) -> PairedContrast:
    """Contrast two models on the same items.

    Args:
        first: outcomes of the first model.
        second: outcomes of the second, at the same positions.
        axis_tokens: period, 2 to P.
        shifts: B of the shift test.
        resamples: of the item bootstrap.
        seed: of shifts and resamples.

    Returns:
        The contrast.

    Raises:
        ValueError: the positions differ, or fewer than two items are complete in both.
    """
    if first.positions.shape != second.positions.shape or (first.positions != second.positions).any():
        raise ValueError("the two runs did not ask the same positions")
    whole = np.isfinite(first.outcomes).all(axis=1) & np.isfinite(second.outcomes).all(axis=1)
    if whole.sum() < 2:
        raise ValueError(f"{whole.sum()} items are complete in both runs; two are needed")
    pair = [replace(o, outcomes=o.outcomes[whole], positions=o.positions[whole]) for o in (first, second)]
    difference = replace(pair[0], outcomes=pair[0].outcomes - pair[1].outcomes)
    test = residue_test(difference, axis_tokens, shifts=shifts, seed=seed)
    item_means = difference.outcomes.mean(axis=1)
    half = 1.959964 * float(item_means.std(ddof=1)) / np.sqrt(len(item_means))
    mean = float(item_means.mean())
    # Equal seeds draw equal splits and item weights, so the draws of the two models are paired.
    gaps = np.subtract(*(gap_draws(o.lap_means(axis_tokens), resamples=resamples, seed=seed) for o in pair))
    low, high = np.quantile(gaps[1:], [0.025, 0.975])
    return PairedContrast(
        axis_tokens=axis_tokens,
        items=int(whole.sum()),
        accuracy_points=100 * mean,
        accuracy_interval_points=(100 * (mean - half), 100 * (mean + half)),
        gap_points=float(gaps[0]),
        gap_interval_points=(float(low), float(high)),
        by_phase_points=(100 * difference.lap_means(axis_tokens).mean(axis=0)).tolist(),
        harmonic_p_value=float(test.p_values[0]),
        omnibus_p_value=test.q_p_value,
    )
