"""From outcomes to the curves and interventions of the schema.

Legend: I items, S phases.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isophase.lab.explain.outcomes import RESAMPLES
from isophase.lab.explain.schema import Curve, Effect, Intervention
from isophase.statistics import cross_fitted_gap, gap_draws, wilson

Array = NDArray[np.float64]

LEAST_ACCURACY = 0.1
"""A share of less accuracy than this says nothing; such phases do not count, and such a model is not explained."""
SMALLEST_GAP_POINTS = 4.0
"""Below this there is no gap to explain: twice the margin of an audit."""
COLLAPSED_SHARE = 0.5
"""A model that keeps less than this share of its accuracy is broken, and its gap says nothing."""
MOSTLY_SHARE = 0.25
"""A cause is called removed when at most this share of the gap is left."""


def curve_of(table_IS: Array, laps: int, seed: int = 0) -> Curve:
    """Summarise accuracies by item and phase.

    Args:
        table_IS: values 0..1.
        laps: outcomes behind each value. For averages over interventions the intervals are then wide rather
            than narrow: an average varies less than a single outcome of the same mean.
        seed: of the gap's splits and resamples.
    """
    mean_S = table_IS.mean(axis=0)
    trials = len(table_IS) * laps
    low, high = wilson(np.clip(mean_S, 0, 1) * trials, np.full(len(mean_S), trials))
    gap = cross_fitted_gap(table_IS, resamples=RESAMPLES, seed=seed)
    return Curve(
        accuracy=float(mean_S.mean()),
        by_phase=mean_S.tolist(),
        interval_by_phase=list(zip(low.tolist(), high.tolist(), strict=True)),
        gap_points=gap.points,
        gap_interval_points=gap.interval_points,
    )


def intervention(
    name: str, before_IS: Array, after_IS: Array, laps: int, meanings: dict[Effect, str], seed: int = 0
) -> Intervention:
    """Compare the gap before and after an intervention, on the same items.

    Args:
        name: what was done.
        before_IS: accuracy by item and phase.
        after_IS: the same under the intervention.
        laps: outcomes behind each value.
        meanings: what each effect means; effects that are not named get general words.
        seed: of splits and resamples, the same for both, so that the draws are paired.
    """
    before, after = curve_of(before_IS, laps, seed), curve_of(after_IS, laps, seed)
    draws = gap_draws(before_IS, resamples=RESAMPLES, seed=seed) - gap_draws(after_IS, resamples=RESAMPLES, seed=seed)
    low, high = np.quantile(draws[1:], [0.025, 0.975])
    effect = _effect(before, after, float(low), float(high))
    return Intervention(
        name=name,
        before=before,
        after=after,
        change_points=float(draws[0]),
        change_interval_points=(float(low), float(high)),
        effect=effect,
        meaning=meanings.get(effect, GENERAL_MEANINGS[effect]),
    )


def not_applicable(name: str, why: str) -> Intervention:
    """An intervention that this model or probe does not allow."""
    return Intervention(
        name=name,
        before=None,
        after=None,
        change_points=None,
        change_interval_points=None,
        effect="not applicable",
        meaning=why,
    )


def _effect(before: Curve, after: Curve, low: float, high: float) -> Effect:
    if after.accuracy < COLLAPSED_SHARE * before.accuracy:
        return "cannot tell"
    if high < 0:
        return "enlarges"
    if before.gap_points < SMALLEST_GAP_POINTS or before.gap_interval_points[0] <= 0:
        return "nothing to remove"
    if low > 0:
        return "removes" if after.gap_points <= MOSTLY_SHARE * before.gap_points else "reduces"
    return "no change"


GENERAL_MEANINGS: dict[Effect, str] = {
    "removes": "Most of the gap is gone: this cause makes it.",
    "reduces": "Part of the gap is gone: this cause takes part.",
    "no change": "The gap is as it was within its interval: no sign of this cause.",
    "enlarges": "The gap grows: the intervention takes away something that had made up for a weakness.",
    "nothing to remove": "There is no gap to explain.",
    "cannot tell": "Accuracy collapses at all phases: the intervention breaks the model, and its gap says nothing.",
    "not applicable": "",
}
