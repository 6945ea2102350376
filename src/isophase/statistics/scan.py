"""Which period, when the stride is unknown: a scan with one set of shifts, min-P, and attribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from isophase.statistics.adjust import min_p
from isophase.statistics.amplitude import Amplitude, degrees_of, estimate_amplitude, harmonic_amplitude
from isophase.statistics.harmonics import ComplexArray, harmonic_sums, rayleigh, residue_test
from isophase.statistics.intervals import gap_draws
from isophase.statistics.observations import FloatArray, Observations

DEFAULT_PERIODS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)

_CHUNK_ELEMENTS = 1 << 18
# z is rounded here, so that shifts that repeat the data tie in spite of floating point.
_Z_DECIMALS = 9
_LARGEST_RANGE = 1 << 62


@dataclass(frozen=True)
class PeriodTest:
    """One period of the scan.

    Attributes:
        period_tokens: the period.
        z: weighted Rayleigh statistic of harmonic 1 on the Exp(1) scale.
        p_value: from cyclic shifts, this period alone.
        p_adjusted: Westfall-Young min-P over all periods of the scan.
        amplitude: half peak to trough of harmonic 1.
        amplitude_upper: 95 % upper limit.
        control: odd, or named as a control by the caller: no compressor uses it.
        explained_by_tokens: for a significant period, the period named, if nothing is left of this one
            beside it: a harmonic, or a neighbour that so short a window cannot tell apart.
    """

    period_tokens: int
    z: float
    p_value: float
    p_adjusted: float
    amplitude: float
    amplitude_upper: float
    control: bool
    explained_by_tokens: int | None = None


@dataclass(frozen=True)
class PeriodScan:
    """What the scan found.

    Attributes:
        tests: one per testable period, ascending.
        line_z: z that the largest of all periods exceeds in 5 % of the shifts.
        period_tokens: the period that explains what is significant, or None.
        effects: effect size behind each test, in the same order.
        untestable: periods asked for that do not fit the window.
    """

    tests: tuple[PeriodTest, ...]
    line_z: float
    period_tokens: int | None
    effects: tuple[Amplitude, ...]
    untestable: tuple[int, ...]


def exponential_scale(z: FloatArray, period_tokens: int) -> FloatArray:
    """Carry z to the scale on which it is Exp(1) under the null.

    Only period 2 changes: its z is about chi-square with one degree, whose tail is heavier, so it is replaced
    by the Exp(1) value of equal tail probability. One line then serves all periods of a figure.

    Args:
        z: any shape, at least 0.
        period_tokens: the period.

    Returns:
        Same shape.
    """
    if period_tokens != 2:
        return z
    return np.asarray(-chi2.logsf(z, 1), dtype=np.float64)


def _shifted_z(sums: ComplexArray, periods: Sequence[int], shifts: int, seed: int) -> FloatArray:
    """[B, K] z of every period after joint shifts of the items; `sums` is [N, K]."""
    items = len(sums)
    # A token shift that is uniform mod every period; beyond 2^62 the rest is too uneven to matter.
    reach = min(math.lcm(*periods), _LARGEST_RANGE)
    rng = np.random.default_rng([seed, 2])
    scatter = (np.abs(sums) ** 2).sum(axis=0)
    z = np.zeros((shifts, len(periods)))
    rows = max(1, _CHUNK_ELEMENTS // items)
    for first in range(0, shifts, rows):
        moves = rng.integers(0, reach, size=(min(rows, shifts - first), items))
        for column, period in enumerate(periods):
            if scatter[column] <= 1e-20:
                continue
            turn = np.exp(2j * np.pi * np.arange(period) / period)
            totals = turn[moves % period] @ sums[:, column]
            z[first : first + len(moves), column] = np.abs(totals) ** 2 / scatter[column]
    return z


def scan_periods(
    observations: Observations,
    periods: Sequence[int] | None = None,
    *,
    controls: Sequence[int] = (),
    shifts: int = 9999,
    seed: int = 0,
    alpha: float = 0.05,
    margin: float = 0.0,
) -> PeriodScan:
    """Test harmonic 1 of many periods against token shifts that they share.

    Item i moves by s_i tokens, F_i(p) -> F_i(p) exp(2 pi i s_i / p), with s_i uniform over the least common
    multiple of the periods: the joint null distribution is kept, so min-P (Westfall & Young 1993) is exact.

    Args:
        observations: complete items, window starts drawn at random; at least one item.
        periods: periods to test; None: `DEFAULT_PERIODS`. Those that do not fit the window (`fits`) are set aside.
        controls: further periods, flagged as controls.
        shifts: B; with B = 999 or more the smallest p-value can survive the adjustment.
        seed: of the shifts.
        alpha: family-wise level.
        margin: smallest amplitude that matters when periods are told apart; what a period leaves of
            others below it counts as explained. Detection does not use it.

    Returns:
        The tests, the line of a figure, and the period named.

    Raises:
        ValueError: a period is below 2, no item is complete, or shifts is below 1.
    """
    if observations.items < 1:
        raise ValueError("no complete item to scan")
    if shifts < 1:
        raise ValueError(f"shifts is {shifts}, it must be at least 1")
    asked = sorted({*(DEFAULT_PERIODS if periods is None else periods), *controls})
    if asked and asked[0] < 2:
        raise ValueError(f"period {asked[0]} is not testable, the shortest is 2 tokens")
    tested = [period for period in asked if fits(period, observations.window_tokens)]
    untestable = tuple(period for period in asked if period not in tested)
    if not tested:
        return PeriodScan((), math.inf, None, (), untestable)

    # Item means are removed first, so that items without any variation are exact zeros.
    centred = _without_item_means(observations)
    sums = np.stack([harmonic_sums(centred, period)[:, 0] for period in tested], axis=1)
    sums[np.abs(sums) < 1e-9] = 0.0
    draws = np.vstack([rayleigh(sums), _shifted_z(sums, tested, shifts, seed)])
    for column, period in enumerate(tested):
        draws[:, column] = exponential_scale(draws[:, column], period)
    draws = np.round(draws, _Z_DECIMALS)
    adjusted = min_p(draws, alpha)

    significant = [period for period, p in zip(tested, adjusted.p_adjusted, strict=True) if p < alpha]
    critical = dict(zip(tested, adjusted.critical.tolist(), strict=True))
    named = attribute_period(centred, significant, critical, margin)
    if named is not None:
        named = extend_period(centred, named, tested, shifts=shifts, seed=seed, margin=margin)
    unexplained = remaining_periods(centred, named, significant, critical, margin) if named else {}
    effects = tuple(estimate_amplitude(observations, period) for period in tested)
    tests = tuple(
        PeriodTest(
            period_tokens=effect.period_tokens,
            z=float(draws[0, column]),
            p_value=float(adjusted.p_values[column]),
            p_adjusted=float(adjusted.p_adjusted[column]),
            amplitude=effect.amplitude,
            amplitude_upper=effect.upper,
            control=effect.period_tokens % 2 == 1 or effect.period_tokens in controls,
            explained_by_tokens=named
            if effect.period_tokens in significant and effect.period_tokens not in {named, *unexplained}
            else None,
        )
        for column, effect in enumerate(effects)
    )
    return PeriodScan(
        tests=tests,
        line_z=float(np.quantile(draws.max(axis=1), 1.0 - alpha)),
        period_tokens=named,
        effects=effects,
        untestable=untestable,
    )


def fits(period_tokens: int, window_tokens: int) -> bool:
    """Whether whole laps of the period use more than two thirds of the window.

    A period that can use less is known so much worse than the others that it would keep every scan open.
    """
    return 3 * (window_tokens // period_tokens * period_tokens) > 2 * window_tokens


def attribute_period(
    observations: Observations, significant: Sequence[int], critical: dict[int, float], margin: float = 0.0
) -> int | None:
    """Name the smallest significant period that explains the other significant ones.

    A pattern of period 8 has power at 8, 4 and 2; removing the residue means mod 8 removes all of it,
    removing those mod 4 leaves period 8. A candidate explains the rest if, after its residue means are gone,
    no other significant period remains (`remaining_periods`). If none does, the one whose largest remaining z
    is smallest wins.

    Args:
        observations: complete items.
        significant: periods whose adjusted p-value is significant.
        critical: z at which each period becomes significant family-wise.
        margin: amplitude below which a remainder does not matter.

    Returns:
        The period, or None where nothing is significant.
    """
    remainders: list[tuple[float, int]] = []
    for candidate in sorted(significant):
        left = remaining_periods(observations, candidate, significant, critical, margin)
        if not left:
            return candidate
        remainders.append((max(left.values()), candidate))
    return min(remainders)[1] if remainders else None


def remaining_periods(
    observations: Observations,
    candidate: int,
    significant: Sequence[int],
    critical: dict[int, float],
    margin: float,
) -> dict[int, float]:
    """Significant periods that are still there once the candidate's residue means are gone, with their z.

    A period remains if its z is critical and its amplitude reaches the margin. Without the second condition a
    nearly deterministic effect, whose noise is tiny, would let a hundredth of a point pass for a period.
    """
    left: dict[int, float] = {}
    for period in significant:
        if period == candidate:
            continue
        rest = _without_candidate(observations, candidate, period)
        sums = harmonic_sums(rest, period)[:, :1]
        z = float(exponential_scale(rayleigh(sums), period)[0])
        power = float(np.abs(sums.sum()) ** 2)
        prompts = rest.window_for(period).outcomes.size
        if z >= critical[period] and harmonic_amplitude(power, prompts, degrees_of(period)) >= margin:
            left[period] = z
    return left


def extend_period(
    observations: Observations,
    period_tokens: int,
    periods: Sequence[int],
    *,
    shifts: int = 9999,
    seed: int = 0,
    alpha: float = 0.01,
    margin: float = 0.0,
) -> int:
    """Move from the period named to a multiple of it, where residues of the multiple differ beyond it.

    One weak phase in eight can be significant at 4 and 2 and miss significance at 8, since each harmonic is
    tested alone. So each multiple's Cochran's Q is tested on what the residue means of the period leave; the
    smallest that is significant at alpha, divided by the number of multiples, becomes the period, and so on.
    A pure period is moved by mistake with probability alpha; detection itself is not affected.

    Args:
        observations: complete items.
        period_tokens: the period that `attribute_period` named.
        periods: periods that may be named.
        shifts: B.
        seed: of the shifts.
        alpha: level of each step.
        margin: half peak to trough below which what a multiple adds does not matter.

    Returns:
        The period, or a multiple of it.
    """
    multiples = [m for m in sorted(periods) if m > period_tokens and m % period_tokens == 0]
    for multiple in multiples:
        rest = _without_candidate(observations, period_tokens, multiple)
        if residue_test(rest, multiple, shifts=shifts, seed=seed).q_p_value > alpha / len(multiples):
            continue
        added = gap_draws(rest.lap_means(multiple), resamples=0, seed=seed)[0] / 200.0
        if added >= margin:
            return extend_period(
                observations, multiple, multiples, shifts=shifts, seed=seed, alpha=alpha, margin=margin
            )
    return period_tokens


def _without_candidate(observations: Observations, candidate: int, period_tokens: int) -> Observations:
    """Remove the candidate's residue means as the test of another period will see them.

    That test reads whole laps only. Means over columns that it does not read would leave a trend along the
    window behind as a residue effect; they are used only where its laps hold no whole lap of the candidate.
    """
    window = observations.window_for(period_tokens)
    same_laps = window.window_tokens % candidate == 0
    return without_residue_means(window if same_laps else observations, candidate)


def without_residue_means(observations: Observations, period_tokens: int) -> Observations:
    """Subtract item means, then the mean of every residue over items."""
    centred = _without_item_means(observations)
    residues = centred.positions % period_tokens
    counts = np.bincount(residues.ravel(), minlength=period_tokens)
    totals = np.bincount(residues.ravel(), weights=centred.outcomes.ravel(), minlength=period_tokens)
    means = totals / np.maximum(counts, 1)
    return replace(centred, outcomes=centred.outcomes - means[residues])


def _without_item_means(observations: Observations) -> Observations:
    outcomes = observations.outcomes
    return replace(observations, outcomes=outcomes - outcomes.mean(axis=1, keepdims=True))
