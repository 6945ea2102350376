"""Records that straddle a chunk edge against those that do not.

Harmonics spread a single bad residue of m = 128 over 64 of them, each too small to see; the contrast asks the
one question a compressor raises, and needs a dozen items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from isophase.statistics.observations import FloatArray, Observations


@dataclass(frozen=True)
class BoundaryContrast:
    """Straddling phases against the others, paired within items.

    Attributes:
        straddling_accuracy: mean outcome at straddling phases.
        inside_accuracy: mean outcome at the others.
        difference_points: straddling minus inside, times 100.
        p_value: two-sided, from the cyclic shifts of the residue test.
        mcnemar_p_value: exact McNemar on one-to-one pairs.
    """

    straddling_accuracy: float
    inside_accuracy: float
    difference_points: float
    p_value: float
    mcnemar_p_value: float


def straddling_phases(stride_tokens: int, span_tokens: int) -> list[int]:
    """Phases at which a record of this length crosses the end of a chunk.

    Args:
        stride_tokens: S.
        span_tokens: length of the record.

    Returns:
        The phases above S - span, in order: none for one token, all where the record is longer than a
        chunk. A record exactly as long as a chunk fits at phase 0 alone.
    """
    return list(range(max(0, stride_tokens - span_tokens + 1), stride_tokens))


def contrast_weights(stride_tokens: int, span_tokens: int) -> FloatArray | None:
    """Weights over residues for mean(straddling) - mean(inside).

    Args:
        stride_tokens: S.
        span_tokens: length of the record.

    Returns:
        [S], sum 0; None where no phase straddles or all do.
    """
    phases = straddling_phases(stride_tokens, span_tokens)
    if not 0 < len(phases) < stride_tokens:
        return None
    weights = np.full(stride_tokens, -1.0 / (stride_tokens - len(phases)))
    weights[phases] = 1.0 / len(phases)
    return weights


def boundary_contrast(observations: Observations, stride_tokens: int, p_value: float) -> BoundaryContrast | None:
    """Describe the contrast; its p-value comes from `residue_test`, whose shifts it shares.

    Args:
        observations: complete items, at least one.
        stride_tokens: S, 2 to P.
        p_value: shift p-value of the contrast with `contrast_weights`.

    Returns:
        Means, difference and both p-values; None where the contrast does not exist.
    """
    weights = contrast_weights(stride_tokens, observations.span_tokens)
    if weights is None:
        return None
    lap_means = observations.lap_means(stride_tokens)
    return BoundaryContrast(
        straddling_accuracy=float(lap_means[:, weights > 0].mean()),
        inside_accuracy=float(lap_means[:, weights < 0].mean()),
        difference_points=100.0 * float((lap_means @ weights).mean()),
        p_value=p_value,
        mcnemar_p_value=mcnemar_p_value(observations, stride_tokens),
    )


def mcnemar_pairs(observations: Observations, stride_tokens: int) -> tuple[FloatArray, FloatArray]:
    """Pair each straddling position with its nearest free neighbour that does not straddle.

    The preferred side alternates within and between items, so that a trend along the window cancels.
    Straddling positions for which no neighbour is left stay out.

    Args:
        observations: complete items.
        stride_tokens: S, 2 to P.

    Returns:
        Outcomes [pairs] at straddling positions, and at their partners.
    """
    window = observations.window_for(stride_tokens)
    bad = set(straddling_phases(stride_tokens, window.span_tokens))
    straddling: list[FloatArray] = []
    inside: list[FloatArray] = []
    starts = window.positions[:, 0] % stride_tokens
    sides = np.arange(window.items) % 2
    for start in range(stride_tokens):
        for side in (0, 1):
            rows = window.outcomes[(starts == start) & (sides == side)]
            if not len(rows):
                continue
            phases = (start + np.arange(window.window_tokens)) % stride_tokens
            columns, partners = _pair_columns(np.isin(phases, list(bad)), side)
            straddling.append(rows[:, columns].ravel())
            inside.append(rows[:, partners].ravel())
    if not straddling:
        return np.empty(0), np.empty(0)
    return np.concatenate(straddling), np.concatenate(inside)


def _pair_columns(straddles: NDArray[np.bool_], first_side: int) -> tuple[list[int], list[int]]:
    free = set(np.flatnonzero(~straddles).tolist())
    columns: list[int] = []
    partners: list[int] = []
    for index, column in enumerate(np.flatnonzero(straddles).tolist()):
        if not free:
            break
        step = -1 if (index + first_side) % 2 == 0 else 1
        same_side = [other for other in free if (other - column) * step > 0]
        partner = min(same_side or free, key=lambda other: (abs(other - column), other))
        free.remove(partner)
        columns.append(column)
        partners.append(partner)
    return columns, partners


def mcnemar_p_value(observations: Observations, stride_tokens: int) -> float:
    """Exact two-sided McNemar test (McNemar 1947) on the pairs of `mcnemar_pairs`.

    For real scores it is the sign test, which coincides with McNemar's for 0 and 1.

    Args:
        observations: complete items.
        stride_tokens: S, 2 to P.

    Returns:
        Binomial p-value of the discordant pairs; 1 where there are none.
    """
    straddling, inside = mcnemar_pairs(observations, stride_tokens)
    worse, better = int((straddling < inside).sum()), int((straddling > inside).sum())
    if worse + better == 0:
        return 1.0
    return min(1.0, 2.0 * float(binom.cdf(min(worse, better), worse + better, 0.5)))
